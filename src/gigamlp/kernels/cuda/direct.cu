// Rows go from global memory to registers, STAGES units ahead: for every architecture.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) gigamlp_fused(PARAMETERS) {
  extern __shared__ __align__(128) u8 shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  let_next_begin();
  copy_weights(shared, packed);
  wait_for_earlier();
  __syncthreads();
  const u8* codes = SHARED_FROM == 0 ? shared : packed;
  const u8* rest = SHARED_FROM < PACKED_BYTES ? shared : packed + SHARED_FROM;
  Job job JOB(stride);
  take_list(job, cells);
  sift_begin(lane);
  job.x = after_wait(job.x);
  job.table = after_wait(job.table);
  const u32 steps = job.per_batch * batches;
  for (u32 step = warp * gridDim.x + blockIdx.x; step < steps; step += gridDim.x * WARPS) {
    const Place at = find(job, step);
    if (at.first >= at.rows) continue;
    const u8* p[2 * TILES];
    const u8* end = rows_end(at, stride);
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) p[i] = row_begin(at, stride, at.first + g + 8 * i);
    Words<16> ahead[STAGES][2 * TILES];
    Words<8> last_8[2 * TILES];
    Words<4> last_4[2 * TILES];
#pragma unroll
    for (int s = 0; s < STAGES; s++)
#pragma unroll
      for (int i = 0; i < 2 * TILES; i++) if (s < UNITS) ahead[s][i] = row_at<16>(p[i] + unit_at(s, t), end);
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) {
      if (HAS_8) last_8[i] = row_at<8>(p[i] + unit_8_at(t), end);
      if (HAS_4) last_4[i] = row_at<4>(p[i] + unit_4_at(t), end);
    }
    Sums sums;
    clear(sums);
#pragma unroll(UNITS <= 16 ? 16 : 1)
    for (int u = 0; u < UNITS; u += STAGES)
#pragma unroll
      for (int s = 0; s < STAGES; s++)
        if (u + s < UNITS) {
          multiply(sums, ahead[s], codes, u + s, lane);
          if (u + s + STAGES < UNITS)
#pragma unroll
            for (int i = 0; i < 2 * TILES; i++) ahead[s][i] = row_at<16>(p[i] + unit_at(u + s + STAGES, t), end);
        }
    if (HAS_8) multiply(sums, last_8, codes, 0, lane);
    if (HAS_4) multiply(sums, last_4, codes, 0, lane);
#pragma unroll
    for (int m = 0; m < TILES; m++) finish(sums[m], rest, at, at.first + 16 * m, lane);
  }
  sift_end(job.hand, lane);
}
