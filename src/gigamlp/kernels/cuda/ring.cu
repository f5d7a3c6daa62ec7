// Each warp has its own ring of STAGES slots in shared memory, which bulk copies fill (Hopper and later). No warp waits
// for another. RING copies whole rows, a step in one copy; WINDOW the bytes that are read, a row in one copy.
constexpr int PITCH = PATH == RING ? FEATURES : K + (K / 16 % 2 ? 0 : 16);  // of a row in a slot; odd / 16: no conflicts
constexpr int SLOT = (ROWS * PITCH + 15) / 16 * 16 + (ALIGN == 16 ? 0 : 32);  // reads may go past the last row

// begin to fill a slot with the rows of a step; the whole warp calls it
DEVICE void fill(const Job& job, u32 step, u8* slot, u32 barrier, int lane) {
  const Place at = find(job, step);
  const i64 left = at.rows - at.first;
  const int count = left < 0 ? 0 : left < ROWS ? (int)left : ROWS;
  const u8* from = at.x + at.first * job.stride;
  if constexpr (PATH == RING) {
    const u32 bytes = count * FEATURES, bulk = bytes & ~15u;
    if constexpr (FEATURES % 16 != 0) {  // the last rows of a batch may end between multiples of 16
      if (bulk + lane < bytes) slot[bulk + lane] = row_load(from + bulk + lane);
      fence_async();
    }
    if (lane == 0) {
      barrier_expect(barrier, bulk);
      if (bulk) bulk_copy(shared_address(slot), from, bulk, barrier);
    }
  } else {
    if (lane == 0) barrier_expect(barrier, count * K);
    __syncwarp();
    for (int r = lane; r < count; r += 32)
      bulk_copy(shared_address(slot + r * PITCH), row_begin(at, job.stride, at.first + r), K, barrier);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) gigamlp_fused(PARAMETERS) {
  extern __shared__ __align__(128) u8 shared[];
  u8* copied = shared + WARPS * STAGES * SLOT;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  u8* slots = shared + warp * STAGES * SLOT;
  u64* barriers = (u64*)(copied + PACKED_BYTES - SHARED_FROM) + warp * STAGES;
  Job job JOB(PATH == RING ? FEATURES : stride);
  const u32 hop = gridDim.x * WARPS;
  u32 step = warp * gridDim.x + blockIdx.x;  // few rows are spread over all multiprocessors
  if (lane == 0) {
    for (int s = 0; s < STAGES; s++) barrier_init(shared_address(barriers + s));
    fence_barrier_init();
    fence_async();
  }
  __syncwarp();
  let_next_begin();
  if (OVERLAP) copy_weights(copied, packed);
  wait_for_earlier();
  job.x = after_wait(job.x);
  job.table = after_wait(job.table);
  take_list(job, cells);
  sift_begin(lane);
  const u32 steps = job.per_batch * batches;
  for (int s = 0; s < STAGES; s++)
    if (step + s * hop < steps) fill(job, step + s * hop, slots + s * SLOT, shared_address(barriers + s), lane);
  if (!OVERLAP) copy_weights(copied, packed);
  __syncthreads();
  const u8* codes = SHARED_FROM == 0 ? copied : packed;
  const u8* rest = copied;
  int stage = 0;
  u32 phase = 0;
  for (; step < steps; step += hop) {
    u8* slot = slots + stage * SLOT;
    const u32 barrier = shared_address(barriers + stage);
    barrier_wait(barrier, phase);
    if constexpr (PATH == RING && FEATURES % 16 != 0) __syncwarp();  // for the bytes that lanes wrote themselves
    const u8* row = slot + g * PITCH + (PATH == RING ? K_OFFSET : 0);
    Sums sums;
    clear(sums);
#pragma unroll(WIDE <= 4 ? 4 : 3)
    for (int c = 0; c < WIDE; c++)
#pragma unroll
      for (int q = 0; q < 2; q++) {
        Words<16> a[2 * TILES];
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++) a[i] = row_at<16>(row + 8 * i * PITCH + c * 128 + pair_at(q, t), nullptr);
        multiply(sums, a, codes, 2 * c + q, lane);
      }
    if constexpr (UNITS > 2 * WIDE) {
      Words<16> a[2 * TILES];
#pragma unroll
      for (int i = 0; i < 2 * TILES; i++) a[i] = row_at<16>(row + 8 * i * PITCH + unit_at(2 * WIDE, t), nullptr);
      multiply(sums, a, codes, 2 * WIDE, lane);
    }
    Words<8> a8[2 * TILES];
    Words<4> a4[2 * TILES];
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) {
      if (HAS_8) a8[i] = row_at<8>(row + 8 * i * PITCH + unit_8_at(t), nullptr);
      if (HAS_4) a4[i] = row_at<4>(row + 8 * i * PITCH + unit_4_at(t), nullptr);
    }
    __syncwarp();  // all lanes have read: the slot is free
    if (step + STAGES * hop < steps) fill(job, step + STAGES * hop, slot, barrier, lane);
    if (HAS_8) multiply(sums, a8, codes, 0, lane);
    if (HAS_4) multiply(sums, a4, codes, 0, lane);
    const Place at = find(job, step);
#pragma unroll
    for (int m = 0; m < TILES; m++) finish(sums[m], rest, at, at.first + 16 * m, lane);
    if (++stage == STAGES) { stage = 0; phase ^= 1; }
  }
  sift_end(job.hand, lane);
}
