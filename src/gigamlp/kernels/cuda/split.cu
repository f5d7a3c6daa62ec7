// Small batches: 16 rows a block, the features split over its warps, codes from the L2 cache beside the rows.
// A launch of few blocks costs latencies one after the other: so all loads of a warp are in flight at once.
extern "C" __global__ void __launch_bounds__(THREADS) gigamlp_fused(PARAMETERS) {
  extern __shared__ __align__(128) u8 shared[];
  constexpr int OWN = UNITS ? (UNITS + WARPS - 1) / WARPS : 1;  // units of a warp: warp, warp + WARPS, …
  constexpr int GROUP = NB * OWN <= 20 ? OWN : NB >= 20 ? 1 : 20 / NB;  // so many at once, 80 registers for codes
  constexpr int LAST = UNITS % WARPS;                           // the first warp with fewer units takes the small ones
  u8* partial = shared + (SHARED_FROM < PACKED_BYTES ? PACKED_BYTES - SHARED_FROM : 0);
  const u8* rest = SHARED_FROM < PACKED_BYTES ? shared : packed + SHARED_FROM;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const Job job{x, out, out2, stride, rows, table, (u32)((rows + ROWS - 1) / ROWS)};
  const Place at = find(job, blockIdx.x);
  if (at.first >= at.rows) return;
  const u8* end = at.x + (at.rows - 1) * stride + K_OFFSET + K;
  const u8* p[2];
#pragma unroll
  for (int i = 0; i < 2; i++) p[i] = at.x + min(at.first + g + 8 * i, at.rows - 1) * stride + K_OFFSET;
  Words<16> a[GROUP][2], w[GROUP][NB];
  Words<8> a8[2], w8[NB];
  Words<4> a4[2], w4[NB];
  Sums sums;
  clear(sums);
#pragma unroll
  for (int first = 0; first < OWN; first += GROUP) {
#pragma unroll
    for (int s = 0; s < GROUP; s++) {
      const int u = (first + s) * WARPS + warp;
      if (first + s < OWN && u < UNITS) {
#pragma unroll
        for (int i = 0; i < 2; i++) a[s][i] = row_at<16>(p[i] + unit_at(u, t), end);
#pragma unroll
        for (int j = 0; j < NB; j++) w[s][j] = codes_at<16>(packed + u * FRAGMENTS + (j * 32 + lane) * 16);
      }
    }
    if (first == 0) {
      if (warp == LAST) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
          if (HAS_8) a8[i] = row_at<8>(p[i] + unit_8_at(t), end);
          if (HAS_4) a4[i] = row_at<4>(p[i] + unit_4_at(t), end);
        }
#pragma unroll
        for (int j = 0; j < NB; j++) {
          if (HAS_8) w8[j] = codes_at<8>(packed + CODES_8 + (j * 32 + lane) * 8);
          if (HAS_4) w4[j] = codes_at<4>(packed + CODES_4 + (j * 32 + lane) * 4);
        }
      }
      copy_weights(shared, packed);
    }
#pragma unroll
    for (int s = 0; s < GROUP; s++)
      if (first + s < OWN && (first + s) * WARPS + warp < UNITS)
#pragma unroll
        for (int j = 0; j < NB; j++) multiply(sums[0][j], a[s][0], a[s][1], w[s][j]);
  }
  if (warp == LAST)
#pragma unroll
    for (int j = 0; j < NB; j++) {
      if (HAS_8) multiply(sums[0][j], a8[0], a8[1], w8[j]);
      if (HAS_4) multiply(sums[0][j], a4[0], a4[1], w4[j]);
    }
  int4* mine = (int4*)(partial + warp * FRAGMENTS) + lane;
#pragma unroll
  for (int j = 0; j < NB; j++) mine[j * 32] = make_int4(sums[0][j][0], sums[0][j][1], sums[0][j][2], sums[0][j][3]);
  __syncthreads();
  // all warps add up and apply the first layer, each to a share of it; one warp does what is left
  u32* hidden = (u32*)(partial + WARPS * FRAGMENTS);
  for (int i = threadIdx.x; i < (NB + 1) / 2 * 64; i += THREADS) {
    const int j = i >> 5;
    int s[4] = {};
    if (j < NB)
#pragma unroll
      for (int k = 0; k < WARPS; k++) {
        const int4 v = ((const int4*)(partial + k * FRAGMENTS))[i];
        s[0] += v.x; s[1] += v.y; s[2] += v.z; s[3] += v.w;
      }
    if constexpr (LATER == 0) {
      if (j < NB) ((int4*)partial)[i] = make_int4(s[0], s[1], s[2], s[3]);
    } else {
      float v[4] = {};
      if (j < NB) first_layer(v, s, rest, j, t);
      constexpr int A = activations[0];
      const uint2 h = j < NB ? make_uint2(halves<A>(v[0], v[1]), halves<A>(v[2], v[3])) : make_uint2(0, 0);
      *(uint2*)(hidden + (j / 2 * 32 + lane) * 4 + j % 2 * 2) = h;
    }
  }
  __syncthreads();
  if (warp > 0) return;
  if constexpr (LATER == 0) {
#pragma unroll
    for (int j = 0; j < NB; j++) {
      const int4 v = ((const int4*)partial)[j * 32 + lane];
      sums[0][j][0] = v.x; sums[0][j][1] = v.y; sums[0][j][2] = v.z; sums[0][j][3] = v.w;
    }
    finish(sums[0], rest, at, at.first, lane);
  } else {
    u32 h[(NB + 1) / 2][4];
#pragma unroll
    for (int k = 0; k < (NB + 1) / 2; k++) {
      const uint4 v = ((const uint4*)hidden)[k * 32 + lane];
      h[k][0] = v.x; h[k][1] = v.y; h[k][2] = v.z; h[k][3] = v.w;
    }
    later<0>(h, rest, at, at.first, lane);
  }
}
