// One small MLP in one kernel: rows of bytes in, answers out. README.md beside this says what goes in and comes out.
//
// source.py writes #defines before this text: the network (K, K_OFFSET, FEATURES, H0, LATER, WIDTHS, ACTIVATIONS,
// CLASSES, HEAD, OUTPUT, SIGNED_ROWS, ID, VALUE_BITS), its arithmetic (COMPUTE, EXPAND, TERMS, MASKED, LATER_TF32), the
// packed weights' sections (MASK_AT, AFFINE_AT, BIAS_AT, WEIGHT_AT, PACKED_BYTES), the path with its sizes (PATH, ORDER,
// ALIGN, TILES, WARPS, STAGES, MIN_BLOCKS, SHARED_FROM, CLUSTER), PACKETS (answers go to the host, as packets), OVERLAP
// (a launch may begin while the one before it in the stream still runs), and of a cascade's stages SIFT (rows that this
// stage is unsure of are listed for the next) and GATHER (the rows are those of such a list). Sizes of rows (K, K_OFFSET,
// FEATURES) are bytes.
//
// A warp computes TILES tiles of 16 rows. In the fragments of mma.m16n8k32 a lane (g = lane / 4, t = lane % 4) has words
// of rows g and g + 8 and of output g. A sum over features does not care about their order, so each lane takes 16
// consecutive bytes of a row at a time and the codes are packed to match: no shuffles, no transposes. The fragments of
// 16 float16 or bfloat16 (m16n8k16) or 8 tf32 (m16n8k8) have the same words in the same lanes, so that nothing but the
// instruction depends on what a row's bytes mean. "Codes" are then the first layer's weights in that format.
enum { DIRECT, RING, WINDOW, SPLIT, WGMMA };                           // PATH
enum { IDENTITY, RELU, TANH, LOGISTIC, GELU, GELU_TANH, SILU };        // ACTIVATIONS
enum { SOFTMAX, SIGMOID, MULTILABEL, REGRESSION };                     // HEAD
enum { CLASS, MARGIN, LOGITS, PROBA };                                 // OUTPUT
enum { INT8, FLOAT16, BFLOAT16, TF32 };                                // COMPUTE: the first layer's operands

constexpr bool IN_SHARED = PATH == RING || PATH == WINDOW;             // where the rows are when they are multiplied
constexpr int ROWS = TILES * 16;
constexpr int THREADS = WARPS * 32;
constexpr int NB = (H0 + 7) / 8;                                       // blocks of 8 first-layer outputs
// The features, padded to 16: units of 64 (16 bytes a lane), then at most one of 32 and one of 16. From shared memory,
// two units make 128 bytes, of which lanes take theirs in the ORDER in which 8 of them read from 32 different banks.
constexpr int UNITS = (K + 15) / 16 / 4;
constexpr int WIDE = IN_SHARED ? UNITS / 2 : 0;
constexpr int HAS_8 = (K + 15) / 16 % 4 / 2;
constexpr int HAS_4 = (K + 15) / 16 % 2;
// A byte of a row meets PARTS bytes of codes: EXPAND = 2 where bytes become float16 before they are multiplied, TERMS = 2
// where each weight is a sum of two, a rounded one and what it lacks.
constexpr int PARTS = EXPAND * TERMS;
constexpr int CODES_8 = UNITS * NB * 512 * PARTS;                      // where the codes of the small units begin
constexpr int CODES_4 = CODES_8 + HAS_8 * NB * 256 * PARTS;

constexpr int widths[] = {H0, WIDTHS}, activations[] = {ACTIVATIONS}, biases[] = {BIAS_AT}, weights[] = {WEIGHT_AT};

// ---- arithmetic -----------------------------------------------------------------------------------------------------

#if COMPUTE == 0
typedef int Sum;
typedef int4 FourSums;

// sums[16 rows][8 outputs] += bytes[16][32] x codes[32][8]: a0, a2 of row g, a1, a3 of row g + 8
DEVICE void mma_32(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
  mma_m16n8k32(c, a0, a1, a2, a3, b0, b1);
#else  // Turing: the same words in the same lanes
  mma_m8n8k16(c[0], c[1], a0, b0);
  mma_m8n8k16(c[2], c[3], a1, b0);
  mma_m8n8k16(c[0], c[1], a2, b1);
  mma_m8n8k16(c[2], c[3], a3, b1);
#endif
}

DEVICE void mma_16(int (&c)[4], u32 a0, u32 a1, u32 b) {
#if __CUDA_ARCH__ >= 800
  mma_m16n8k16(c, a0, a1, b);
#else
  mma_m8n8k16(c[0], c[1], a0, b);
  mma_m8n8k16(c[2], c[3], a1, b);
#endif
}

DEVICE float real(int v) { return __int2float_rn(v); }
#endif

DEVICE void mma_half(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
  mma_half_k16(c, a0, a1, a2, a3, b0, b1);
#else
  mma_half_k8(c, a0, a1, b0);
  mma_half_k8(c, a2, a3, b1);
#endif
}

#if COMPUTE != 0
typedef float Sum;
typedef float4 FourSums;

// the same words, 32 bytes of 16 rows: 16 or 8 numbers
DEVICE void mma_32(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if COMPUTE == 1
  mma_half(c, a0, a1, a2, a3, b0, b1);
#elif COMPUTE == 2
  mma_bfloat_k16(c, a0, a1, a2, a3, b0, b1);
#else
  mma_tf32_k8(c, a0, a1, a2, a3, b0, b1);
#endif
}

DEVICE void mma_16(float (&c)[4], u32 a0, u32 a1, u32 b) {
#if COMPUTE == 1
  mma_half_k8(c, a0, a1, b);
#elif COMPUTE == 2
  mma_bfloat_k8(c, a0, a1, b);
#else
  mma_tf32_k4(c, a0, a1, b);
#endif
}

DEVICE float real(float v) { return v; }
#endif

// a later layer's product: 16 inputs in float16, or 8 in tf32
DEVICE void mma_later(float (&c)[4], const u32 (&a)[4], uint2 b) {
#if LATER_TF32
  mma_tf32_k8(c, a[0], a[1], a[2], a[3], b.x, b.y);
#else
  mma_half(c, a[0], a[1], a[2], a[3], b.x, b.y);
#endif
}

template <int A> DEVICE float activate(float v) {
  if constexpr (A == RELU) return fmaxf(v, 0.f);
  else if constexpr (A == TANH) return tanhf(v);
  else if constexpr (A == LOGISTIC) return 1.f / (1.f + expf(-v));
  else if constexpr (A == GELU) return 0.5f * v * (1.f + erff(v * 0.70710678f));
  else if constexpr (A == GELU_TANH) return 0.5f * v * (1.f + tanhf(0.79788456f * (v + 0.044715f * v * v * v)));
  else if constexpr (A == SILU) return v / (1.f + expf(-v));
  else return v;
}

// activation, then rounding to two float16 in a word, `low` in its lower half
template <int A> DEVICE u32 halves(float low, float high) {
#if __CUDA_ARCH__ >= 800
  if constexpr (A == RELU) return two_halves_relu(low, high);
  else return two_halves(activate<A>(low), activate<A>(high));
#else
  return half_of(activate<A>(low)) | (u32)half_of(activate<A>(high)) << 16;
#endif
}

// ---- which rows -----------------------------------------------------------------------------------------------------

// What the stages of a cascade hand each other: a list of rows, and about it u32 cells: how many there are, how many
// blocks have read that, and for the host how many there were in the last run, then in u64 how many in all runs, and the
// runs. The last block to read the number clears it for the next run.
enum { LISTED, READ_BY, WERE, ALL = 4, RUNS = 6 };

#if SIFT
constexpr int HELD = 48;  // unsure rows that a warp keeps before it lists 32 of them: at most 31, and those of a tile
__shared__ u32 held_rows[WARPS][HELD];
__shared__ u32 held_counts[WARPS];
#endif

struct Hand {      // of a cascade's stage
  const u32* from;
  u32 *to, *cells;
  float threshold;
};

struct Job {       // what the kernel was given
  const u8* x;
  void *out, *out2;
  i64 stride, rows;
  const i64* table;
  u32 per_batch;   // steps of ROWS rows in a batch
  u32 serial;      // of the launch, in its packets
  Hand hand;
  i64 whole;       // with GATHER, rows of the batch that the list is about; `rows` are those listed
};

struct Place {     // one step: rows `first` .. of a batch of `rows`
  const u8* x;
  void *out, *out2;
  i64 first, rows;
  u32 serial;
  Hand hand;
  i64 whole;
};

DEVICE Place find(const Job& job, u32 step) {
  if (GATHER || !job.table) return {job.x, job.out, job.out2, (i64)step * ROWS, job.rows, job.serial, job.hand, job.whole};
  const u32 batch = step / (job.per_batch ? job.per_batch : 1);  // 0 where no batch has rows: one block comes all the same
  const i64* entry = job.table + 4 * batch;
  return {(const u8*)__ldg(entry), (void*)__ldg(entry + 1), (void*)__ldg(entry + 2),
          (i64)(step - batch * job.per_batch) * ROWS, __ldg(entry + 3), job.serial, job.hand, 0};
}

// where row `row` of a step's batch, or its last row, begins, and where the batch's rows end
DEVICE const u8* row_begin(const Place& at, i64 stride, i64 row) {
  if constexpr (GATHER) return at.x + at.hand.from[min((u32)row, (u32)at.rows - 1)] * stride + K_OFFSET;
  return at.x + min(row, at.rows - 1) * stride + K_OFFSET;
}

DEVICE const u8* rows_end(const Place& at, i64 stride) {
  return at.x + ((GATHER ? at.whole : at.rows) - 1) * stride + K_OFFSET + K;
}

// ---- words of rows and codes ----------------------------------------------------------------------------------------

template <int W> struct Words { u32 w[W / 4]; };

DEVICE void put(Words<16>& v, uint4 u) { v.w[0] = u.x; v.w[1] = u.y; v.w[2] = u.z; v.w[3] = u.w; }
DEVICE void put(Words<8>& v, uint2 u) { v.w[0] = u.x; v.w[1] = u.y; }
DEVICE void put(Words<4>& v, u32 u) { v.w[0] = u; }

template <int W> struct Vector;
template <> struct Vector<16> { typedef uint4 type; };
template <> struct Vector<8> { typedef uint2 type; };
template <> struct Vector<4> { typedef u32 type; };

template <int W> DEVICE Words<W> packed_at(const u8* p) {
  Words<W> v;
  if constexpr (SHARED_FROM == 0) put(v, *(const typename Vector<W>::type*)p);
  else put(v, __ldg((const typename Vector<W>::type*)p));
  return v;
}

// the codes of block j for a lane's W bytes of a unit
template <int W> DEVICE Words<W * PARTS> codes_at(const u8* codes, int unit, int j, int lane) {
  const u8* own = codes + (W == 16 ? unit * (NB * 512 * PARTS) : W == 8 ? CODES_8 : CODES_4);
  Words<W * PARTS> v;
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    const Words<W> one = packed_at<W>(own + ((part * NB + j) * 32 + lane) * W);
#pragma unroll
    for (int i = 0; i < W / 4; i++) v.w[part * (W / 4) + i] = one.w[i];
  }
  return v;
}

// What __ldg reads must not change while the kernel runs. Rows do if the launch before writes them: then plain loads,
// which see what was waited for.
template <class T> DEVICE T row_load(const T* p) {
  if constexpr (OVERLAP || CARRIED) return *p;
  else return __ldg(p);
}

// the word at p, a multiple of 4; bytes from `end` on are no part of the rows, and 0
DEVICE u32 word_at(const u8* p, const u8* end) {
  if constexpr (IN_SHARED) return *(const u32*)p;
  if (p + 4 <= end) return row_load((const u32*)p);
  u32 v = 0;
  if constexpr (ALIGN == 1)
    for (int i = 0; i < 3; i++) if (p + i < end) v |= (u32)row_load(p + i) << 8 * i;
  return v;
}

// W bytes of a row. What follows the last feature may be anything: its codes are 0, and `operand` clears floats.
template <int W> DEVICE Words<W> row_at(const u8* p, const u8* end) {
  Words<W> v;
  if constexpr (ALIGN == 16 && IN_SHARED) {
    put(v, *(const typename Vector<W>::type*)p);
  } else if constexpr (ALIGN == 16 && W == 16 && !CARRIED) {
    put(v, PATH == WGMMA ? load_here(p) : load_once(p));
  } else if constexpr (ALIGN == 16) {
    put(v, row_load((const typename Vector<W>::type*)p));
  } else if constexpr (ALIGN == 4) {
#pragma unroll
    for (int i = 0; i < W / 4; i++) v.w[i] = word_at(p + 4 * i, end);
  } else {
    const u32 shift = (u32)(u64)p % 4;
    const u8* q = p - shift;
    u32 low = word_at(q, end);
#pragma unroll
    for (int i = 0; i < W / 4; i++) {
      u32 high = word_at(q + 4 * i + 4, end);
      v.w[i] = __funnelshift_r(low, high, 8 * shift);
      low = high;
    }
  }
  return v;
}

// a lane's W bytes of a unit as they are multiplied
template <int W> DEVICE Words<W * EXPAND> operand(Words<W> row, const u8* codes, int unit, int t) {
  if constexpr (MASKED) {  // what the MLP does not read may be NaN, which no code of 0 takes away
    const int at = W == 16 ? unit * 64 : W == 8 ? UNITS * 64 : UNITS * 64 + HAS_8 * 32;
    const Words<W> mask = packed_at<W>(codes + MASK_AT + at + t * W);
#pragma unroll
    for (int i = 0; i < W / 4; i++) row.w[i] &= mask.w[i];
  }
  Words<W * EXPAND> v;
#pragma unroll
  for (int i = 0; i < W / 4; i++) {
    if constexpr (EXPAND == 2) {
      // a byte b below the upper byte 0x64 is the float16 1024 + b
      const u32 bytes = SIGNED_ROWS ? row.w[i] ^ 0x80808080u : row.w[i], less = SIGNED_ROWS ? 0x64806480u : 0x64006400u;
      v.w[2 * i] = subtract_halves(__byte_perm(bytes, 0x64646464u, 0x4140), less);
      v.w[2 * i + 1] = subtract_halves(__byte_perm(bytes, 0x64646464u, 0x4342), less);
    } else {
#if COMPUTE == 3
      v.w[i] = tf32_of(__uint_as_float(row.w[i]));
#else
      v.w[i] = row.w[i];
#endif
    }
  }
  return v;
}

typedef Sum Sums[TILES][NB][4];

DEVICE void clear(Sums& sums) {
#pragma unroll
  for (int m = 0; m < TILES; m++)
#pragma unroll
    for (int j = 0; j < NB; j++) sums[m][j][0] = sums[m][j][1] = sums[m][j][2] = sums[m][j][3] = 0;
}

template <int W> DEVICE void multiply(Sum (&c)[4], const Words<W>& a, const Words<W>& b, const Words<W * TERMS>& w) {
#pragma unroll
  for (int term = 0; term < TERMS; term++) {
    const u32* v = w.w + term * (W / 4);
    if constexpr (W == 4) mma_16(c, a.w[0], b.w[0], v[0]);
#pragma unroll
    for (int i = 0; i < W / 8; i++) mma_32(c, a.w[2 * i], b.w[2 * i], a.w[2 * i + 1], b.w[2 * i + 1], v[2 * i], v[2 * i + 1]);
  }
}

// one unit of features: sums += rows x codes. rows[2 m] and rows[2 m + 1] are rows g and g + 8 of tile m
template <int W> DEVICE void multiply(Sums& sums, const Words<W> (&rows)[2 * TILES], const u8* codes, int unit, int lane) {
  Words<W * EXPAND> a[2 * TILES];
#pragma unroll
  for (int i = 0; i < 2 * TILES; i++) a[i] = operand(rows[i], codes, unit, lane & 3);
#pragma unroll
  for (int j = 0; j < NB; j++) {
    const Words<W * PARTS> w = codes_at<W>(codes, unit, j, lane);
#pragma unroll
    for (int m = 0; m < TILES; m++) multiply(sums[m][j], a[2 * m], a[2 * m + 1], w);
  }
}

// where lane t's 16 bytes of unit q of two begin, and of any unit
DEVICE int pair_at(int q, int t) {
  return ORDER == 0 ? q * 64 + t * 16 : ORDER == 1 ? q * 16 + t * 32 : q * 32 + t % 2 * 16 + t / 2 * 64;
}
DEVICE int unit_at(int unit, int t) {
  return unit < 2 * WIDE ? unit / 2 * 128 + pair_at(unit % 2, t) : unit * 64 + t * 16;
}
DEVICE int unit_8_at(int t) { return UNITS * 64 + t * 8; }
DEVICE int unit_4_at(int t) { return UNITS * 64 + HAS_8 * 32 + t * 4; }

// ---- from sums to answers -------------------------------------------------------------------------------------------

// first layer, before its activation: outputs 8 j + 2 t and the next one, of rows g (0, 1) and g + 8 (2, 3)
DEVICE void first_layer(float (&v)[4], const Sum (&sums)[4], const u8* rest, int j, int t) {
  const float4 s = *(const float4*)(rest + AFFINE_AT - SHARED_FROM + (j * 8 + 2 * t) * 8);
  // two roundings, as in the reference: no fused multiply-add
  v[0] = __fadd_rn(__fmul_rn(real(sums[0]), s.x), s.y);
  v[1] = __fadd_rn(__fmul_rn(real(sums[1]), s.z), s.w);
  v[2] = __fadd_rn(__fmul_rn(real(sums[2]), s.x), s.y);
  v[3] = __fadd_rn(__fmul_rn(real(sums[3]), s.z), s.w);
}

DEVICE float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
  return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}

DEVICE float quad_sum(float v) {
  v += __shfl_xor_sync(~0u, v, 1);
  return v + __shfl_xor_sync(~0u, v, 2);
}

// A packet is a value and the launch's serial number, 8 bytes that arrive together: a host that sees the number has the
// value too. So nothing has to say that all are there, and no write needs to wait for another.
DEVICE void store(const Place& at, void* out, i64 index, float v) {
  if constexpr (PACKETS) store_packet(out, index, __float_as_uint(v), at.serial);
  else if constexpr (VALUE_BITS == 16) ((u16*)out)[index] = half_of(v);
  else ((float*)out)[index] = v;
}

// the row of the batch that row `row` of the list is
DEVICE i64 listed(const Place& at, i64 row) {
  if constexpr (GATHER) return at.hand.from[row];
  else return row;
}

DEVICE void store_id(const Place& at, i64 row, int id) {
  if constexpr (PACKETS) store_packet(at.out, row, id, at.serial);
  else ((ID*)at.out)[row] = (ID)id;
}

DEVICE void store_margin(const Place& at, i64 row, float v) {
  if constexpr (PACKETS) store_packet(at.out2, row, __float_as_uint(v), at.serial);
  else ((float*)at.out2)[row] = v;
}

// the two largest logits of row g + 8 r and the class, for all four lanes of the row; `second` is for margins only
template <int N> DEVICE void top_two(const float (&c)[N][4], int r, int t, float& best, float& second, int& id) {
  best = second = -INFINITY;
  id = 0;
#pragma unroll
  for (int j = 0; j < N; j++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int column = 8 * j + 2 * t + i;
      const float v = 8 * j + 8 <= CLASSES || column < CLASSES ? c[j][2 * r + i] : -INFINITY;
      if constexpr (OUTPUT == MARGIN || SIFT) second = fmaxf(second, fminf(best, v));
      if (v > best) { best = v; id = column; }
    }
#pragma unroll
  for (int m = 1; m < 4; m *= 2) {
    const float other = __shfl_xor_sync(~0u, best, m);
    const int other_id = __shfl_xor_sync(~0u, id, m);
    if constexpr (OUTPUT == MARGIN || SIFT)
      second = fmaxf(fmaxf(second, __shfl_xor_sync(~0u, second, m)), fminf(best, other));
    if (other > best || (other == best && other_id < id)) { best = other; id = other_id; }
  }
}

#if SIFT
// List the first `count` (up to 32) of the rows that this warp holds, and keep the others.
DEVICE void list_held(const Hand& hand, u32 count, u32 held, int lane) {
  u32* rows = held_rows[threadIdx.x / 32];
  u32 begin = 0;
  if (lane == 0) begin = count_more(hand.cells + LISTED, count);
  begin = __shfl_sync(~0u, begin, 0);
  if (lane < count) hand.to[begin + lane] = rows[lane];
  const u32 kept = 32 + lane < held ? rows[32 + lane] : 0;
  __syncwarp();
  if (32 + lane < held) rows[lane] = kept;
}

// Hold `row` if `unsure`. The whole warp calls it, and each row is asked about by one lane.
DEVICE void sift(const Hand& hand, bool unsure, u32 row, int lane) {
  const u32 votes = __ballot_sync(~0u, unsure);
  if (!votes) return;
  const int warp = threadIdx.x / 32;
  u32 held = held_counts[warp];
  if (unsure) held_rows[warp][held + __popc(votes & ((1u << lane) - 1))] = row;
  held += __popc(votes);
  __syncwarp();
  if (held >= 32) {
    list_held(hand, 32, held, lane);
    held -= 32;
  }
  if (lane == 0) held_counts[warp] = held;
  __syncwarp();
}

// before the first step, and after the last one
DEVICE void sift_begin(int lane) {
  if (lane == 0) held_counts[threadIdx.x / 32] = 0;
  __syncwarp();
}

DEVICE void sift_end(const Hand& hand, int lane) {
  __syncwarp();
  const u32 held = held_counts[threadIdx.x / 32];
  if (held) list_held(hand, held, held, lane);
}
#else
DEVICE void sift(const Hand&, bool, u32, int) {}
DEVICE void sift_begin(int) {}
DEVICE void sift_end(const Hand&, int) {}
#endif

// a stage of a cascade: its class, and whether the row goes on. Lane t = r of a row's four has row g + 8 r.
template <int N> DEVICE void answer_stage(const float (&c)[N][4], const Place& at, i64 row0, int lane) {
  const int g = lane >> 2, t = lane & 3;
  float margin = 0.f;
  int id = 0;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float best, second;
    int which;
    if constexpr (HEAD == SIGMOID) {
      const float z = __shfl_sync(~0u, c[0][2 * r], lane & ~3);
      best = fabsf(z), second = 0.f, which = z > 0.f;
    } else {
      top_two(c, r, t, best, second, which);
    }
    if (t == r) { id = which; margin = best - second; }
  }
  const i64 place = row0 + g + 8 * t;
  const bool mine = t < 2 && place < at.rows;
  const i64 row = mine ? listed(at, place) : 0;
  if (mine) {
    store_id(at, row, id);
    if constexpr (OUTPUT == MARGIN) store_margin(at, row, margin);
  }
  sift(at.hand, mine && !(margin >= at.hand.threshold), (u32)row, lane);
}

// the answers for one tile from its logits; lane (g, t) has columns 8 j + 2 t and the next one
template <int N> DEVICE void answer(float (&c)[N][4], const Place& at, i64 row0, int lane) {
  if constexpr (SIFT || GATHER) {
    answer_stage(c, at, row0, lane);
    return;
  }
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const i64 row = row0 + g + 8 * r;
    const bool mine = row < at.rows;
    if constexpr (HEAD == SIGMOID && OUTPUT != LOGITS) {
      const float z = c[0][2 * r];
      if (mine && t == 0) {
        if constexpr (OUTPUT == PROBA) {
          const float p = activate<LOGISTIC>(z);
          if constexpr (PACKETS) {
            store(at, at.out, 2 * row, 1.f - p);
            store(at, at.out, 2 * row + 1, p);
          } else {
            ((float2*)at.out)[row] = make_float2(1.f - p, p);
          }
        } else {
          store_id(at, row, z > 0.f);
          if constexpr (OUTPUT == MARGIN) store_margin(at, row, fabsf(z));
        }
      }
    } else if constexpr (OUTPUT == CLASS || OUTPUT == MARGIN) {
      float best, second;
      int id;
      top_two(c, r, t, best, second, id);
      if (mine && t == 0) {
        store_id(at, row, id);
        if constexpr (OUTPUT == MARGIN) store_margin(at, row, best - second);
      }
    } else {
      float most = 0.f, scale = 1.f;
      if constexpr (OUTPUT == PROBA && HEAD == SOFTMAX) {
        most = -INFINITY;
#pragma unroll
        for (int j = 0; j < N; j++)
#pragma unroll
          for (int i = 0; i < 2; i++) {
            if (8 * j + 8 > CLASSES && 8 * j + 2 * t + i >= CLASSES) c[j][2 * r + i] = -INFINITY;
            most = fmaxf(most, c[j][2 * r + i]);
          }
        most = quad_max(most);
        scale = 0.f;
#pragma unroll
        for (int j = 0; j < N; j++)
#pragma unroll
          for (int i = 0; i < 2; i++) scale += c[j][2 * r + i] = expf(c[j][2 * r + i] - most);
        scale = 1.f / quad_sum(scale);
      }
#pragma unroll
      for (int j = 0; j < N; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int column = 8 * j + 2 * t + i;
          float v = c[j][2 * r + i];
          if constexpr (OUTPUT == PROBA) v = HEAD == MULTILABEL ? activate<LOGISTIC>(v) : v * scale;
          if (mine && (8 * j + 8 <= CLASSES || column < CLASSES)) store(at, at.out, row * CLASSES + column, v);
        }
    }
  }
}

DEVICE constexpr int later_steps(int blocks) { return LATER_TF32 ? blocks : (blocks + 1) / 2; }

// The C fragment of block j after its activation, as part of the next layer's A fragments: in float16 two blocks make
// one. In tf32 lane t has columns t and t + 4 of A, and 2 t and 2 t + 1 of C: the weights are packed in that order.
template <int A, int N> DEVICE void take(u32 (&h)[N][4], int j, const float (&v)[4]) {
#if LATER_TF32
  h[j][0] = tf32_of(activate<A>(v[0]));
  h[j][1] = tf32_of(activate<A>(v[2]));
  h[j][2] = tf32_of(activate<A>(v[1]));
  h[j][3] = tf32_of(activate<A>(v[3]));
#else
  h[j / 2][j % 2 * 2] = halves<A>(v[0], v[1]);
  h[j / 2][j % 2 * 2 + 1] = halves<A>(v[2], v[3]);
#endif
}

// Later layer L, from what is before it: the C fragments of one layer are, rounded, the A fragments of the next.
template <int L, int N> DEVICE void biases_of(float (&c)[N][4], const u8* rest, int t) {
#pragma unroll
  for (int j = 0; j < N; j++) {
    const float2 b = *(const float2*)(rest + biases[L] - SHARED_FROM + (j * 8 + 2 * t) * 4);
    c[j][0] = c[j][2] = b.x;
    c[j][1] = c[j][3] = b.y;
  }
}

template <int L, int N, int KB> DEVICE void products(float (&c)[N][4], const u32 (&a)[KB][4], const u8* rest, int lane) {
#pragma unroll
  for (int k = 0; k < KB; k++)
#pragma unroll
    for (int j = 0; j < N; j++) mma_later(c[j], a[k], *(const uint2*)(rest + weights[L] - SHARED_FROM + ((k * N + j) * 32 + lane) * 8));
}

template <int L, int KB> DEVICE void later(const u32 (&a)[KB][4], const u8* rest, const Place& at, i64 row0, int lane);

// from the sums of later layer L to the answers
template <int L, int N> DEVICE void onwards(float (&c)[N][4], const u8* rest, const Place& at, i64 row0, int lane) {
  constexpr int A = activations[L + 1];
  if constexpr (L + 1 == LATER) {
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) c[j][i] = activate<A>(c[j][i]);
    answer(c, at, row0, lane);
  } else {
    u32 h[later_steps(N)][4] = {};
#pragma unroll
    for (int j = 0; j < N; j++) take<A>(h, j, c[j]);
    later<L + 1>(h, rest, at, row0, lane);
  }
}

template <int L, int KB> DEVICE void later(const u32 (&a)[KB][4], const u8* rest, const Place& at, i64 row0, int lane) {
  float c[(widths[L + 1] + 7) / 8][4];
  biases_of<L>(c, rest, lane & 3);
  products<L>(c, a, rest, lane);
  onwards<L>(c, rest, at, row0, lane);
}

// the first layer's outputs as A fragments of the next; those that `h` has too many stay as they are
template <int KB> DEVICE void hidden_of(u32 (&h)[KB][4], const Sum (&sums)[NB][4], const u8* rest, int t) {
  constexpr int A = activations[0];
#pragma unroll
  for (int j = 0; j < NB; j++) {
    float v[4];
    first_layer(v, sums[j], rest, j, t);
    take<A>(h, j, v);
  }
}

DEVICE void finish(const Sum (&sums)[NB][4], const u8* rest, const Place& at, i64 row0, int lane) {
  if constexpr (LATER == 0) {
    float c[NB][4];
#pragma unroll
    for (int j = 0; j < NB; j++) {
      first_layer(c[j], sums[j], rest, j, lane & 3);
#pragma unroll
      for (int i = 0; i < 4; i++) c[j][i] = activate<activations[0]>(c[j][i]);
    }
    answer(c, at, row0, lane);
  } else {
    u32 h[later_steps(NB)][4] = {};
    hidden_of(h, sums, rest, lane & 3);
    later<0>(h, rest, at, row0, lane);
  }
}

// ---- paths ----------------------------------------------------------------------------------------------------------

// packed[SHARED_FROM ..] to shared memory; no barrier
DEVICE void copy_weights(u8* to, const u8* packed) {
  for (int i = SHARED_FROM + 16 * threadIdx.x; i < PACKED_BYTES; i += 16 * THREADS)
    *(uint4*)(to + i - SHARED_FROM) = __ldg((const uint4*)(packed + i));
}

#if PACKETS
#define SERIAL , u32 serial
#else
#define SERIAL
constexpr u32 serial = 0;
#endif

#if GATHER
#define GATHERED , const u32 *list, u32 *cells
#else
#define GATHERED
constexpr u32 *list = nullptr, *cells = nullptr;
#endif

#if SIFT
#define SIFTED , u32 *next_list, u32 *next_cells, float threshold
#else
#define SIFTED
constexpr u32 *next_list = nullptr, *next_cells = nullptr;
constexpr float threshold = 0.f;
#endif

// rows that travel with the launch, as one of its arguments
#if CARRIED
struct alignas(16) CarriedRows { u8 bytes[CARRIED]; };
#define CARRIED_ROWS , const __grid_constant__ CarriedRows carried
#define FIRST_ROW carried.bytes
#else
#define CARRIED_ROWS
#define FIRST_ROW x
#endif

#define PARAMETERS                                                                                                  \
  const u8 *__restrict__ x, i64 stride, const u8 *__restrict__ packed, void *__restrict__ out, void *__restrict__ out2, \
      i64 rows, const i64 *__restrict__ table, int batches SERIAL CARRIED_ROWS GATHERED SIFTED

#define JOB(stride)                                                                                          \
  {FIRST_ROW, out, out2, stride, rows, table, (u32)((rows + ROWS - 1) / ROWS), serial, {list, next_list, next_cells, threshold}, rows}

// With GATHER: the job is about the listed rows. The whole block calls it, after `wait_for_earlier`. A __syncthreads
// between reading the number and saying so keeps the block that clears it from being early.
DEVICE void take_list(Job& job, u32* cells) {
#if GATHER
  const u32 count = *(volatile u32*)(cells + LISTED);
  job.rows = count;
  job.per_batch = (count + ROWS - 1) / ROWS;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    if (count_more(cells + READ_BY, 1) == gridDim.x - 1) {
      cells[WERE] = count;
      cells[LISTED] = cells[READ_BY] = 0;
      *(u64*)(cells + ALL) += count;
      *(u64*)(cells + RUNS) += 1;
    }
  }
#endif
}

// The next launch of the stream may begin from here on, if it is one that waits by itself. Then, before anything that
// an earlier launch may have written is read, or anything that it may read is written, all that was before is waited
// for: by every block, or one launch could end before an earlier one has.
DEVICE void let_next_begin() {
#if OVERLAP || (SIFT && __CUDA_ARCH__ >= 900)
  launch_dependents();
#endif
}

DEVICE void wait_for_earlier() {
#if OVERLAP
  wait_for_dependencies();
#endif
}

// `p`, of which the compiler cannot know that loads through it could as well come before the wait: it takes what __ldg
// reads for constant, and moves it
template <class T> DEVICE T* after_wait(T* p) {
#if OVERLAP
  hide(p);
#endif
  return p;
}
