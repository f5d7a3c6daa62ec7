// Wide first layers on Hopper: wgmma, a warpgroup (4 warps) a step of 64 rows. Codes stay in shared memory; rows go from
// global memory to registers, STAGES units ahead, also while the step before is being finished. First layers that do not
// fit are shared out: each of the CLUSTER blocks of a team has H0 outputs and the weights that follow them, and all
// go over the same rows. For each step one of them, the leader, gets the others' parts of the second layer's sums: in one
// go while the next step is being multiplied, or if they are large (LATE is 0) in several, each acknowledged. A cluster
// has TEAMS teams, which go over different rows; codes come once for all blocks that multiply by the same ones.
extern __shared__ __align__(128) u8 shared[];

constexpr int GROUPS = WARPS / 4;
constexpr int STEP_CODES = H0 * 32;                                    // bytes of codes for 32 features
constexpr int DEPTH = STAGES < UNITS ? STAGES : UNITS ? UNITS : 1;     // units of a row on their way
constexpr bool TURNS = GROUPS == 2 && DEPTH == UNITS;                  // one multiplies while the other finishes a step
constexpr int N1 = (widths[LATER ? 1 : 0] + 7) / 8;
constexpr bool LATE = N1 <= 4;
constexpr int PIECE = LATE ? N1 : 4;                                   // blocks of 8 sums that are sent at a time
constexpr int PART = CLUSTER > 1 ? PIECE * 2048 : 0;                   // their bytes, for 64 rows

// rows g and g + 8 of a warp's 16, in a step: where they begin; listed ones by number, which takes half the registers
struct Rows {
  const u8 *p[2], *end;
  u32 number[2];
  const u8* x;
  i64 stride;

  METHOD const u8* begin(int i) const { return GATHER ? x + number[i] * stride + K_OFFSET : p[i]; }
};

DEVICE Rows rows_of(const Job& job, u32 step, int row) {
  const Place at = find(job, step);
  Rows r;
  r.end = rows_end(at, job.stride);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if constexpr (GATHER) r.number[i] = at.hand.from[min((u32)at.first + row + 8 * i, (u32)at.rows - 1)];
    else r.p[i] = row_begin(at, job.stride, at.first + row + 8 * i);
  }
  r.x = at.x;
  r.stride = job.stride;
  return r;
}

// the first of the steps `step`, `step` + `hop`, … that has rows
DEVICE u32 occupied(const Job& job, u32 step, u32 hop, u32 steps) {
  for (; step < steps; step += hop) {
    const Place at = find(job, step);
    if (at.first < at.rows) break;
  }
  return step;
}

struct Ahead {                                                         // rows that have been read
  Words<16> unit[DEPTH][2];
  Words<8> unit_8[2];
  Words<4> unit_4[2];
};

DEVICE void read(Ahead& a, const Rows& r, int u, int t) {
#pragma unroll
  for (int i = 0; i < 2; i++) a.unit[u % DEPTH][i] = row_at<16>(r.begin(i) + unit_at(u, t), r.end);
}

DEVICE void read_last(Ahead& a, const Rows& r, int t) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (HAS_8) a.unit_8[i] = row_at<8>(r.begin(i) + unit_8_at(t), r.end);
    if (HAS_4) a.unit_4[i] = row_at<4>(r.begin(i) + unit_4_at(t), r.end);
  }
}

// What the blocks of a cluster tell each other about the steps of one group of warps.
struct Exchange {
  u8* parts;                                                           // [sender][block of 8 outputs][thread] float4
  u32 full, taken;                                                     // barriers: parts have come; the leader has read
  u32 rank, base;                                                      // in the team; of its first block, in the cluster
  u32 led, sent;                                                       // pieces so far

  // the sender's slot at the leader's
  METHOD static u32 slot(u32 sender, u32 leader) { return (sender - (sender > leader)) * PART + (threadIdx.x & 127) * 16; }

  METHOD void give(const float (&c)[N1][4], int first, u32 leader) {
    const u32 to = other_block(shared_address(parts) + slot(rank, leader), base + leader), arrived = other_block(full, base + leader);
#pragma unroll
    for (int j = 0; j < PIECE; j++) if (first + j < N1) send(to + j * 2048, c[first + j], arrived);
    sent++;
  }

  METHOD void expect(int first) {
    if ((threadIdx.x & 127) == 0) barrier_expect(full, (CLUSTER - 1) * min(PIECE, N1 - first) * 2048);
  }

  // sum += all blocks' parts, in the same order whoever adds up
  METHOD void take(float (&sum)[N1][4], const float (&own)[N1][4], int first) {
    barrier_wait_cluster(full, led++ & 1);
#pragma unroll
    for (int from = 0; from < CLUSTER; from++)
#pragma unroll
      for (int i = 0; i < PIECE; i++)
        if (const int j = first + i; j < N1) {
          float4 v = make_float4(own[j][0], own[j][1], own[j][2], own[j][3]);
          if (from != rank) v = *(const float4*)(parts + slot(from, rank) + i * 2048);
          sum[j][0] += v.x; sum[j][1] += v.y; sum[j][2] += v.z; sum[j][3] += v.w;
        }
  }

  // for LATE: the answers of a step whose parts were expected a step ago. A slot is written again only after that:
  // whoever sends the next part has, since, led a step itself and got from this block what it sent afterwards.
  METHOD void finish(const float (&own)[N1][4], const Place& at, int row0, int lane) {
    float sum[N1][4];
    biases_of<0>(sum, shared, lane & 3);
    take(sum, own, 0);
    onwards<0>(sum, shared, at, at.first + row0, lane);
  }

  // otherwise: piece by piece, each sent when the one before has been read
  METHOD void run(const float (&c)[N1][4], u32 leader, const Place& at, int row0, int lane) {
    float sum[N1][4];
    if (rank == leader) biases_of<0>(sum, shared, lane & 3);
#pragma unroll
    for (int first = 0; first < N1; first += PIECE) {
      if (rank != leader) {
        if (sent > 0) barrier_wait_cluster(taken, (sent - 1) & 1);
        give(c, first, leader);
      } else {
        expect(first);
        take(sum, c, first);
        __syncwarp();
        if (lane < CLUSTER && lane != rank) arrive_at(other_block(taken, base + lane));
      }
    }
    if (rank == leader) onwards<0>(sum, shared, at, at.first + row0, lane);
  }
};

// the other group's turn, and whether it is alone from now on
DEVICE void hand_over(u64* turns, volatile int* alone, int group, int lane, bool last) {
  if (last) alone[1 - group] = 1;
  __syncwarp();
  if (lane == 0) barrier_arrive(shared_address(turns + 1 - group));
}

extern "C" __global__ void CLUSTER_OF(CLUSTER * TEAMS) __launch_bounds__(THREADS, 1) gigamlp_fused(PARAMETERS) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int group = warp >> 2, row0 = (warp & 3) * 16;
  const u32 place = CLUSTER * TEAMS > 1 ? cluster_rank() : 0, rank = place % CLUSTER, base = place - rank;
  const u32 teams = gridDim.x / CLUSTER;
  const u8* own = packed + rank * PACKED_BYTES;
  u64* copied = (u64*)(shared + PACKED_BYTES + GROUPS * (CLUSTER - 1) * PART);
  u64* full = copied + UNITS + 1;                                      // one a group, as the next two
  u64* taken = full + GROUPS;
  u64* turns = taken + GROUPS;                                         // whose turn it is to multiply
  volatile int* alone = (volatile int*)(turns + 2);                    // whether the other group has no more steps
  Job job JOB(stride);
  const u32 hop = teams * GROUPS, begin = group * teams + blockIdx.x / CLUSTER;
  u32 steps = job.per_batch * batches;
  u32 step = 0;

  Ahead a;
  auto read_first = [&] {
    step = occupied(job, begin, hop, steps);
    if (step >= steps) return;
    const Rows r = rows_of(job, step, row0 + g);
#pragma unroll
    for (int u = 0; u < DEPTH; u++) if (u < UNITS) read(a, r, u, t);
    read_last(a, r, t);
  };
  if (!GATHER && !OVERLAP) read_first();
  let_next_begin();
  if (threadIdx.x == 0) {
    for (int i = 0; i < UNITS + 1 + GROUPS; i++) barrier_init(shared_address(copied + i));
    for (int i = 0; i < GROUPS; i++) barrier_init(shared_address(taken + i), 4);
    if (TURNS)
      for (int i = 0; i < 2; i++) { barrier_init(shared_address(turns + i), 4); alone[i] = 0; }
    fence_barrier_init();
    fence_async();
    for (int i = 0; i <= UNITS; i++) {  // a unit's codes are used as soon as they are there
      const int from = i * 2 * STEP_CODES, bytes = i < UNITS ? 2 * STEP_CODES : PACKED_BYTES - from;
      barrier_expect(shared_address(copied + i), bytes);
      if (TEAMS == 1 && bytes) bulk_copy(shared_address(shared + from), own + from, bytes, shared_address(copied + i));
    }
  }
  __syncthreads();
  if constexpr (CLUSTER * TEAMS > 1) cluster_arrive();  // this block has its barriers
  if constexpr (TEAMS > 1) {
    cluster_wait();  // and all others have theirs
    if (threadIdx.x == 0) {
      u32 same = 0;
      for (int i = 0; i < TEAMS; i++) same |= 1u << (i * CLUSTER + rank);
      for (int i = 0; i <= UNITS; i++) {
        const int from = i * 2 * STEP_CODES, bytes = i < UNITS ? 2 * STEP_CODES : PACKED_BYTES - from;
        if (bytes && i % TEAMS == base / CLUSTER)
          bulk_copy_to(same, shared_address(shared + from), own + from, bytes, shared_address(copied + i));
      }
    }
  }
  if constexpr (GATHER || OVERLAP) {
    wait_for_earlier();
    take_list(job, cells);
    steps = job.per_batch * batches;
    read_first();
  }
  sift_begin(lane);

  const u64 codes = matrix_at(shared_address(shared)), second = matrix_at(shared_address(shared + (LATER ? weights[0] : 0)));
  const u32 zero = (u32)batches >> 31;
  bool fresh = true, together = TURNS;
  u32 turn = 0, before = 0;                                            // steps so far, and the one before
  bool mine = false;                                                   // whether this block led that
  float own_part[N1][4];
  Exchange exchange{shared + PACKED_BYTES + group * (CLUSTER - 1) * PART, shared_address(full + group), shared_address(taken + group), rank, base};
  if (TURNS && step >= steps) hand_over(turns, alone, group, lane, true);
  while (step < steps) {
    const u32 next = occupied(job, step + hop, hop, steps);
    Rows r = rows_of(job, step, row0 + g), after = r;
    if (next < steps) after = rows_of(job, next, row0 + g);
    if (together && group + turn > 0) {
      barrier_wait(shared_address(turns + group), (group ? turn : turn - 1) & 1);
      together = !alone[group];
    }
    int sums[NB][4];
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
      if (fresh) barrier_wait(shared_address(copied + u), 0);
      u32 operand[2][4];
#pragma unroll
      for (int i = 0; i < 8; i++) operand[i / 4][i % 4] = used_now(a.unit[u % DEPTH][i % 2].w[i / 2], zero);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 2; i++)
        wgmma(sums, operand[i][0], operand[i][1], operand[i][2], operand[i][3], codes + (2 * u + i) * STEP_CODES / 16, u + i > 0);
      wgmma_commit();
      if (u > 0) {
        wgmma_wait<1>();  // unit u - 1 has been multiplied, and its registers are free
        if (u - 1 + DEPTH < UNITS) read(a, r, u - 1 + DEPTH, t);
        else if (next < steps) read(a, after, (u - 1) % DEPTH, t);
      }
    }
    if (fresh) barrier_wait(shared_address(copied + UNITS), 0);
    fresh = false;
    if constexpr (HAS_8 || HAS_4) {
      wgmma_fence();
      if constexpr (HAS_8 != 0)
        wgmma(sums, a.unit_8[0].w[0], a.unit_8[1].w[0], a.unit_8[0].w[1], a.unit_8[1].w[1],
              codes + 2 * UNITS * STEP_CODES / 16, UNITS > 0);
      if constexpr (HAS_4 != 0)
        wgmma(sums, a.unit_4[0].w[0], a.unit_4[1].w[0], 0, 0, codes + (2 * UNITS + HAS_8) * STEP_CODES / 16, UNITS + HAS_8 > 0);
      wgmma_commit();
    }
    if (TURNS) hand_over(turns, alone, group, lane, next >= steps);
    wgmma_wait<0>();
    if (next < steps) {
      if (UNITS > 0) read(a, after, (UNITS - 1) % DEPTH, t);
      read_last(a, after, t);
    }

    const Place at = find(job, step);
    if constexpr (LATER == 0) {
      finish(sums, shared, at, at.first + row0, lane);
    } else {
      u32 h[(NB + 1) / 2][4];
      hidden_of(h, sums, shared, t);
      float c[N1][4] = {};
      if constexpr (CLUSTER == 1) biases_of<0>(c, shared, t);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < NB / 2; k++) wgmma_half(c, h[k], second + k * N1 * 16);
      wgmma_commit();
      wgmma_wait<0>();
      if constexpr (CLUSTER == 1) {
        onwards<0>(c, shared, at, at.first + row0, lane);
      } else {
        const u32 leader = turn % CLUSTER;
        if (TEAMS == 1 && turn == 0) cluster_wait();  // all blocks have their barriers
        if constexpr (!LATE) {
          exchange.run(c, leader, at, row0, lane);
        } else {
          if (mine) exchange.finish(own_part, find(job, before), row0, lane);
          mine = rank == leader;
          before = step;
          if (mine) {
#pragma unroll
            for (int j = 0; j < N1; j++)
#pragma unroll
              for (int i = 0; i < 4; i++) own_part[j][i] = c[j][i];
            exchange.expect(0);
          } else {
            exchange.give(c, 0, leader);
          }
        }
      }
    }
    turn++;
    step = next;
  }
  if constexpr (CLUSTER > 1 && LATE)
    if (mine) exchange.finish(own_part, find(job, before), row0, lane);
  if constexpr (CLUSTER > 1 && !LATE) {  // what others acknowledge is written to this block's shared memory
    if (exchange.sent > 0) barrier_wait_cluster(exchange.taken, (exchange.sent - 1) & 1);
  }
  if constexpr (TEAMS > 1) {  // a block without rows goes when its codes have come all the same
    if (threadIdx.x == 0)
      for (int i = 0; i <= UNITS; i++) barrier_wait(shared_address(copied + i), 0);
  }
  // no block goes while others may still write to its shared memory: it has waited for all that they send
  if constexpr (GATHER && CLUSTER > 1 && TEAMS == 1)
    if (turn == 0) cluster_wait();
  if (GATHER && fresh)  // nor while codes still come that nobody needed
    for (int i = 0; i <= UNITS; i++) barrier_wait(shared_address(copied + i), 0);
  sift_end(job.hand, lane);
}
