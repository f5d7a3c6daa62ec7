// Small batches: a step of rows a block, the features split over its warps, codes from the L2 cache beside the rows. A
// launch of few blocks costs latencies one after the other: so all loads of a warp are on their way at once.

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) gigamlp_fused(PARAMETERS) {
  extern __shared__ __align__(128) u8 shared[];
  constexpr int OWN = UNITS ? (UNITS + WARPS - 1) / WARPS : 1;  // units of a warp: warp, warp + WARPS, …
  constexpr int GROUP = NB * OWN <= 20 ? OWN : NB >= 20 ? 1 : 20 / NB;  // so many at once, 80 registers for codes
  constexpr int SHARE = (NB + WARPS - 1) / WARPS;               // of the small units each warp multiplies a few blocks
  constexpr int KB = (NB + 1) / 2;                              // pairs of blocks, the A fragments of the next layer
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const Job job{x, out, out2, stride, rows, table, (u32)((rows + ROWS - 1) / ROWS), serial};
  let_next_begin();
  const Place at = find(job, blockIdx.x);
  if (at.first >= at.rows) {
    wait_for_earlier();
    return;
  }
  const u8* end = at.x + (at.rows - 1) * stride + K_OFFSET + K;
  const u8* p[2 * TILES];
#pragma unroll
  for (int i = 0; i < 2 * TILES; i++) p[i] = at.x + min(at.first + g + 8 * i, at.rows - 1) * stride + K_OFFSET;

  Words<16> a[GROUP][2 * TILES], w[GROUP][NB];
  Words<8> a8[2 * TILES], w8[SHARE];
  Words<4> a4[2 * TILES], w4[SHARE];
  Sums sums;
  clear(sums);
#pragma unroll
  for (int first = 0; first < OWN; first += GROUP) {
    // weights need not wait for earlier launches, rows have to; without OVERLAP there is one pass with both
#pragma unroll
    for (int pass = 0; pass <= OVERLAP; pass++) {
      const bool of_rows = pass == OVERLAP, of_codes = pass == 0;
      if (first == 0 && of_rows) {
        wait_for_earlier();
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++) p[i] = after_wait(p[i]);
      }
#pragma unroll
      for (int s = 0; s < GROUP; s++) {
        const int u = (first + s) * WARPS + warp;
        if (first + s < OWN && u < UNITS) {
#pragma unroll
          for (int i = 0; i < 2 * TILES; i++) if (of_rows) a[s][i] = row_at<16>(p[i] + unit_at(u, t), end);
#pragma unroll
          for (int j = 0; j < NB; j++) if (of_codes) w[s][j] = codes_at<16>(packed + u * FRAGMENTS + (j * 32 + lane) * 16);
        }
      }
      if (first == 0) {
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++) {
          if (HAS_8 && of_rows) a8[i] = row_at<8>(p[i] + unit_8_at(t), end);
          if (HAS_4 && of_rows) a4[i] = row_at<4>(p[i] + unit_4_at(t), end);
        }
#pragma unroll
        for (int s = 0; s < SHARE; s++) {
          const int j = s * WARPS + warp;
          if (HAS_8 && of_codes && j < NB) w8[s] = codes_at<8>(packed + CODES_8 + (j * 32 + lane) * 8);
          if (HAS_4 && of_codes && j < NB) w4[s] = codes_at<4>(packed + CODES_4 + (j * 32 + lane) * 4);
        }
        if (of_codes) copy_weights(shared, packed);
      }
    }
#pragma unroll
    for (int s = 0; s < GROUP; s++)
      if (first + s < OWN && (first + s) * WARPS + warp < UNITS)
#pragma unroll
        for (int j = 0; j < NB; j++)
#pragma unroll
          for (int m = 0; m < TILES; m++) multiply(sums[m][j], a[s][2 * m], a[s][2 * m + 1], w[s][j]);
  }
#pragma unroll
  for (int j = 0; j < NB; j++)
    if ((HAS_8 || HAS_4) && j % WARPS == warp)
#pragma unroll
      for (int m = 0; m < TILES; m++) {
        if (HAS_8) multiply(sums[m][j], a8[2 * m], a8[2 * m + 1], w8[j / WARPS]);
        if (HAS_4) multiply(sums[m][j], a4[2 * m], a4[2 * m + 1], w4[j / WARPS]);
      }

  // all warps add up the sums and apply the first layer, each to a share of them
  const u8* rest = SHARED_FROM < PACKED_BYTES ? shared : packed + SHARED_FROM;
  int4* partial = (int4*)(shared + PACKED_BYTES - SHARED_FROM);  // [warp][tile][block][lane]
  uint2* hidden = (uint2*)(partial + WARPS * TILES * NB * 32);   // [tile][pair of blocks][lane][block of the pair]
#pragma unroll
  for (int m = 0; m < TILES; m++)
#pragma unroll
    for (int j = 0; j < NB; j++)
      partial[((warp * TILES + m) * NB + j) * 32 + lane] = make_int4(sums[m][j][0], sums[m][j][1], sums[m][j][2], sums[m][j][3]);
  __syncthreads();
  for (int i = warp; i < TILES * 2 * KB; i += WARPS) {
    const int m = i / (2 * KB), j = i % (2 * KB), from = (m * NB + j) * 32 + lane;
    int s[4] = {};
    if (j < NB)
#pragma unroll
      for (int k = 0; k < WARPS; k++) {
        const int4 v = partial[k * TILES * NB * 32 + from];
        s[0] += v.x; s[1] += v.y; s[2] += v.z; s[3] += v.w;
      }
    if constexpr (LATER == 0) {
      if (j < NB) partial[from] = make_int4(s[0], s[1], s[2], s[3]);
    } else {
      constexpr int A = activations[0];
      uint2 h = make_uint2(0, 0);
      if (j < NB) {
        float v[4];
        first_layer(v, s, rest, j, t);
        h = make_uint2(halves<A>(v[0], v[1]), halves<A>(v[2], v[3]));
      }
      hidden[((m * KB + j / 2) * 32 + lane) * 2 + j % 2] = h;
    }
  }
  __syncthreads();
  // what is left has no parts that many warps could do: one warp a tile
  for (int m = warp; m < TILES; m += WARPS) {
    if constexpr (LATER == 0) {
      int s[NB][4];
#pragma unroll
      for (int j = 0; j < NB; j++) {
        const int4 v = partial[(m * NB + j) * 32 + lane];
        s[j][0] = v.x; s[j][1] = v.y; s[j][2] = v.z; s[j][3] = v.w;
      }
      finish(s, rest, at, at.first + 16 * m, lane);
    } else {
      u32 h[KB][4];
#pragma unroll
      for (int k = 0; k < KB; k++) {
        const uint4 v = ((const uint4*)hidden)[(m * KB + k) * 32 + lane];
        h[k][0] = v.x; h[k][1] = v.y; h[k][2] = v.z; h[k][3] = v.w;
      }
      later<0>(h, rest, at, at.first + 16 * m, lane);
    }
  }
}
