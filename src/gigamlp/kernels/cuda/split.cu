// Small batches: a step of rows a block, the features split over its warps, codes from the L2 cache beside the rows. A
// launch of few blocks costs latencies one after the other: so all loads of a warp are on their way at once.

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) gigamlp_fused(PARAMETERS) {
  extern __shared__ __align__(128) u8 shared[];
  constexpr int OWN = UNITS ? (UNITS + WARPS - 1) / WARPS : 1;  // units of a warp: warp, warp + WARPS, …
  constexpr int GROUP = NB * PARTS * OWN <= 20 ? OWN : NB * PARTS >= 20 ? 1 : 20 / (NB * PARTS);  // so many at once, 80 registers for codes
  constexpr int SHARE = (NB + WARPS - 1) / WARPS;               // of the small units each warp multiplies a few blocks
  constexpr int KB = later_steps(NB);                           // A fragments of the next layer
  constexpr int EACH = LATER_TF32 ? 1 : 2;                      // blocks of an A fragment
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const Job job{FIRST_ROW, out, out2, stride, rows, table, (u32)((rows + ROWS - 1) / ROWS), serial};
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

  Words<16> a[GROUP][2 * TILES];
  Words<16 * PARTS> w[GROUP][NB];
  Words<8> a8[2 * TILES];
  Words<8 * PARTS> w8[SHARE];
  Words<4> a4[2 * TILES];
  Words<4 * PARTS> w4[SHARE];
  Sums sums;
  clear(sums);
#pragma unroll(OWN <= 16 ? 16 : 1)
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
          for (int j = 0; j < NB; j++) if (of_codes) w[s][j] = codes_at<16>(packed, u, j, lane);
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
          if (HAS_8 && of_codes && j < NB) w8[s] = codes_at<8>(packed, 0, j, lane);
          if (HAS_4 && of_codes && j < NB) w4[s] = codes_at<4>(packed, 0, j, lane);
        }
        if (of_codes) copy_weights(shared, packed);
      }
    }
#pragma unroll
    for (int s = 0; s < GROUP; s++)
      if (const int u = (first + s) * WARPS + warp; first + s < OWN && u < UNITS)
#pragma unroll
        for (int m = 0; m < TILES; m++) {
          const auto low = operand(a[s][2 * m], packed, u, t), high = operand(a[s][2 * m + 1], packed, u, t);
#pragma unroll
          for (int j = 0; j < NB; j++) multiply(sums[m][j], low, high, w[s][j]);
        }
  }
#pragma unroll
  for (int m = 0; m < TILES; m++) {
    if constexpr (HAS_8) {
      const auto low = operand(a8[2 * m], packed, 0, t), high = operand(a8[2 * m + 1], packed, 0, t);
#pragma unroll
      for (int j = 0; j < NB; j++) if (j % WARPS == warp) multiply(sums[m][j], low, high, w8[j / WARPS]);
    }
    if constexpr (HAS_4) {
      const auto low = operand(a4[2 * m], packed, 0, t), high = operand(a4[2 * m + 1], packed, 0, t);
#pragma unroll
      for (int j = 0; j < NB; j++) if (j % WARPS == warp) multiply(sums[m][j], low, high, w4[j / WARPS]);
    }
  }

  // all warps add up the sums and apply the first layer, each to a share of them
  const u8* rest = SHARED_FROM < PACKED_BYTES ? shared : packed + SHARED_FROM;
  FourSums* partial = (FourSums*)(shared + PACKED_BYTES - SHARED_FROM);  // [warp][tile][block][lane]
  u32* hidden = (u32*)(partial + WARPS * TILES * NB * 32);       // [tile][A fragment][lane][block of it][word]
#pragma unroll
  for (int m = 0; m < TILES; m++)
#pragma unroll
    for (int j = 0; j < NB; j++)
      partial[((warp * TILES + m) * NB + j) * 32 + lane] = FourSums{sums[m][j][0], sums[m][j][1], sums[m][j][2], sums[m][j][3]};
  __syncthreads();
  for (int i = warp; i < TILES * EACH * KB; i += WARPS) {
    const int m = i / (EACH * KB), j = i % (EACH * KB), from = (m * NB + j) * 32 + lane;
    Sum s[4] = {};
    if (j < NB)
#pragma unroll
      for (int k = 0; k < WARPS; k++) {
        const FourSums v = partial[k * TILES * NB * 32 + from];
        s[0] += v.x; s[1] += v.y; s[2] += v.z; s[3] += v.w;
      }
    if constexpr (LATER == 0) {
      if (j < NB) partial[from] = FourSums{s[0], s[1], s[2], s[3]};
    } else {
      constexpr int A = activations[0];
      u32 h[1][4] = {};
      if (j < NB) {
        float v[4];
        first_layer(v, s, rest, j, t);
        take<A>(h, 0, v);
      }
      u32* to = hidden + ((m * KB + j / EACH) * 32 + lane) * 4;
      if constexpr (LATER_TF32) *(uint4*)to = uint4{h[0][0], h[0][1], h[0][2], h[0][3]};
      else *(uint2*)(to + j % 2 * 2) = make_uint2(h[0][0], h[0][1]);
    }
  }
  __syncthreads();
  // what is left has no parts that many warps could do: one warp a tile
  for (int m = warp; m < TILES; m += WARPS) {
    if constexpr (LATER == 0) {
      Sum s[NB][4];
#pragma unroll
      for (int j = 0; j < NB; j++) {
        const FourSums v = partial[(m * NB + j) * 32 + lane];
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
