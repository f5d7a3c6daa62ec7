// One small MLP in one kernel: rows of bytes in, answers out. README.md beside this says what goes in and comes out.
//
// source.py writes #defines before this text: the network (K, K_OFFSET, FEATURES, H0, LATER, WIDTHS, ACTIVATIONS,
// CLASSES, HEAD, OUTPUT, SIGNED_ROWS, ID, VALUE_BITS), the packed weights' sections (AFFINE_AT, BIAS_AT, WEIGHT_AT,
// PACKED_BYTES), and the path with its sizes (PATH, ALIGN, TILES, WARPS, STAGES, MIN_BLOCKS, SHARED_FROM).
//
// A warp computes TILES tiles of 16 rows. In the fragments of mma.m16n8k32 a lane (g = lane / 4, t = lane % 4) has words
// of rows g and g + 8 and of output g. A sum over features does not care about their order, so each lane takes 16
// consecutive bytes of a row at a time and the codes are packed to match: no shuffles, no transposes.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

enum { DIRECT, RING, WINDOW, SPLIT };                                  // PATH
enum { IDENTITY, RELU, TANH, LOGISTIC, GELU, GELU_TANH, SILU };        // ACTIVATIONS
enum { SOFTMAX, SIGMOID, MULTILABEL, REGRESSION };                     // HEAD
enum { CLASS, MARGIN, LOGITS, PROBA };                                 // OUTPUT

constexpr bool IN_SHARED = PATH == RING || PATH == WINDOW;             // where the rows are when they are multiplied
constexpr int ROWS = TILES * 16;
constexpr int THREADS = WARPS * 32;
constexpr int NB = (H0 + 7) / 8;                                       // blocks of 8 first-layer outputs
// The features, padded to 16: units of 64 (16 bytes a lane), then at most one of 32 and one of 16. From shared memory,
// two units make 128 features, of which a lane takes 32 in a row: then 8 lanes read from 32 different banks.
constexpr int UNITS = (K + 15) / 16 / 4;
constexpr int WIDE = IN_SHARED ? UNITS / 2 : 0;
constexpr int HAS_8 = (K + 15) / 16 % 4 / 2;
constexpr int HAS_4 = (K + 15) / 16 % 2;
constexpr int CODES_8 = UNITS * NB * 512;                              // where the codes of the small units begin
constexpr int CODES_4 = CODES_8 + HAS_8 * NB * 256;
constexpr int FRAGMENTS = NB * 512;                                    // bytes of one tile's sums

#define INFINITY __int_as_float(0x7f800000)

constexpr int widths[] = {H0, WIDTHS}, activations[] = {ACTIVATIONS}, biases[] = {BIAS_AT}, weights[] = {WEIGHT_AT};

// ---- arithmetic -----------------------------------------------------------------------------------------------------

#if SIGNED_ROWS
#define BYTES "s8"
#else
#define BYTES "u8"
#endif

// sums[16 rows][8 outputs] += bytes[16][32] x codes[32][8]: a0, a2 of row g, a1, a3 of row g + 8
__device__ __forceinline__ void mma_32(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32." BYTES ".s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else  // Turing's m8n8k16 has the same words in the same lanes
  u32 a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
#pragma unroll
  for (int i = 0; i < 4; i++)
    asm volatile("mma.sync.aligned.m8n8k16.row.col.s32." BYTES ".s8.s32 {%0,%1},{%2},{%3},{%0,%1};"
                 : "+r"(c[i % 2 * 2]), "+r"(c[i % 2 * 2 + 1]) : "r"(a[i]), "r"(b[i / 2]));
#endif
}

__device__ __forceinline__ void mma_16(int (&c)[4], u32 a0, u32 a1, u32 b) {
#if __CUDA_ARCH__ >= 800
  asm volatile("mma.sync.aligned.m16n8k16.row.col.s32." BYTES ".s8.s32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(b));
#else
  asm volatile("mma.sync.aligned.m8n8k16.row.col.s32." BYTES ".s8.s32 {%0,%1},{%2},{%3},{%0,%1};"
               : "+r"(c[0]), "+r"(c[1]) : "r"(a0), "r"(b));
  asm volatile("mma.sync.aligned.m8n8k16.row.col.s32." BYTES ".s8.s32 {%0,%1},{%2},{%3},{%0,%1};"
               : "+r"(c[2]), "+r"(c[3]) : "r"(a1), "r"(b));
#endif
}

// float32 sums[16][8] += float16 a[16][16] x b[16][8]
__device__ __forceinline__ void mma_half(float (&c)[4], const u32 (&a)[4], uint2 b) {
#if __CUDA_ARCH__ >= 800
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
#else
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(b.x));
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[2]), "r"(a[3]), "r"(b.y));
#endif
}

template <int A> __device__ __forceinline__ float activate(float v) {
  if constexpr (A == RELU) return fmaxf(v, 0.f);
  else if constexpr (A == TANH) return tanhf(v);
  else if constexpr (A == LOGISTIC) return 1.f / (1.f + expf(-v));
  else if constexpr (A == GELU) return 0.5f * v * (1.f + erff(v * 0.70710678f));
  else if constexpr (A == GELU_TANH) return 0.5f * v * (1.f + tanhf(0.79788456f * (v + 0.044715f * v * v * v)));
  else if constexpr (A == SILU) return v / (1.f + expf(-v));
  else return v;
}

__device__ __forceinline__ u16 half_of(float v) {
  u16 h;
  asm("cvt.rn.f16.f32 %0,%1;" : "=h"(h) : "f"(v));
  return h;
}

// activation, then rounding to two float16 in a word, `low` in its lower half
template <int A> __device__ __forceinline__ u32 halves(float low, float high) {
  u32 h;
#if __CUDA_ARCH__ >= 800
  if constexpr (A == RELU) asm("cvt.rn.relu.f16x2.f32 %0,%1,%2;" : "=r"(h) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(h) : "f"(activate<A>(high)), "f"(activate<A>(low)));
#else
  h = half_of(activate<A>(low)) | (u32)half_of(activate<A>(high)) << 16;
#endif
  return h;
}

// ---- which rows -----------------------------------------------------------------------------------------------------

struct Job {       // what the kernel was given
  const u8* x;
  void *out, *out2;
  i64 stride, rows;
  const i64* table;
  u32 per_batch;   // steps of ROWS rows in a batch
};

struct Place {     // one step: rows `first` .. of a batch of `rows`
  const u8* x;
  void *out, *out2;
  i64 first, rows;
};

__device__ __forceinline__ Place find(const Job& job, u32 step) {
  if (!job.table) return {job.x, job.out, job.out2, (i64)step * ROWS, job.rows};
  const u32 batch = step / job.per_batch;
  const i64* entry = job.table + 4 * batch;
  return {(const u8*)__ldg(entry), (void*)__ldg(entry + 1), (void*)__ldg(entry + 2),
          (i64)(step - batch * job.per_batch) * ROWS, __ldg(entry + 3)};
}

// ---- words of rows and codes ----------------------------------------------------------------------------------------

template <int W> struct Words { u32 w[W / 4]; };

__device__ __forceinline__ void put(Words<16>& v, uint4 u) { v.w[0] = u.x; v.w[1] = u.y; v.w[2] = u.z; v.w[3] = u.w; }
__device__ __forceinline__ void put(Words<8>& v, uint2 u) { v.w[0] = u.x; v.w[1] = u.y; }
__device__ __forceinline__ void put(Words<4>& v, u32 u) { v.w[0] = u; }

template <int W> struct Vector;
template <> struct Vector<16> { typedef uint4 type; };
template <> struct Vector<8> { typedef uint2 type; };
template <> struct Vector<4> { typedef u32 type; };

template <int W> __device__ __forceinline__ Words<W> codes_at(const u8* p) {
  Words<W> v;
  if constexpr (SHARED_FROM == 0) put(v, *(const typename Vector<W>::type*)p);
  else put(v, __ldg((const typename Vector<W>::type*)p));
  return v;
}

// the word at p, a multiple of 4; bytes from `end` on are no part of the rows, and 0
__device__ __forceinline__ u32 word_at(const u8* p, const u8* end) {
  if constexpr (IN_SHARED) return *(const u32*)p;
  if (p + 4 <= end) return __ldg((const u32*)p);
  u32 v = 0;
  if constexpr (ALIGN == 1)
    for (int i = 0; i < 3; i++) if (p + i < end) v |= (u32)__ldg(p + i) << 8 * i;
  return v;
}

// W bytes of a row. What follows the last feature may be anything: its codes are 0.
template <int W> __device__ __forceinline__ Words<W> row_at(const u8* p, const u8* end) {
  Words<W> v;
  if constexpr (ALIGN == 16 && IN_SHARED) {
    put(v, *(const typename Vector<W>::type*)p);
  } else if constexpr (ALIGN == 16 && W == 16) {
    asm volatile("ld.global.nc.L2::128B.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "l"(p));
  } else if constexpr (ALIGN == 16) {
    put(v, __ldg((const typename Vector<W>::type*)p));
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

typedef int Sums[TILES][NB][4];

__device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
  for (int m = 0; m < TILES; m++)
#pragma unroll
    for (int j = 0; j < NB; j++) sums[m][j][0] = sums[m][j][1] = sums[m][j][2] = sums[m][j][3] = 0;
}

template <int W> __device__ __forceinline__ void multiply(int (&c)[4], const Words<W>& a, const Words<W>& b, const Words<W>& w) {
  if constexpr (W == 4) mma_16(c, a.w[0], b.w[0], w.w[0]);
#pragma unroll
  for (int i = 0; i < W / 8; i++) mma_32(c, a.w[2 * i], b.w[2 * i], a.w[2 * i + 1], b.w[2 * i + 1], w.w[2 * i], w.w[2 * i + 1]);
}

// one unit of features: sums += rows x codes. rows[2 m] and rows[2 m + 1] are rows g and g + 8 of tile m
template <int W> __device__ __forceinline__ void multiply(Sums& sums, const Words<W> (&rows)[2 * TILES], const u8* codes, int lane) {
#pragma unroll
  for (int j = 0; j < NB; j++) {
    const Words<W> w = codes_at<W>(codes + (j * 32 + lane) * W);
#pragma unroll
    for (int m = 0; m < TILES; m++) multiply(sums[m][j], rows[2 * m], rows[2 * m + 1], w);
  }
}

// where lane t's 16 bytes of a unit begin
__device__ __forceinline__ int unit_at(int unit, int t) {
  return unit < 2 * WIDE ? unit / 2 * 128 + unit % 2 * 16 + t * 32 : unit * 64 + t * 16;
}
__device__ __forceinline__ int unit_8_at(int t) { return UNITS * 64 + t * 8; }
__device__ __forceinline__ int unit_4_at(int t) { return UNITS * 64 + HAS_8 * 32 + t * 4; }

// ---- from sums to answers -------------------------------------------------------------------------------------------

// first layer, before its activation: outputs 8 j + 2 t and the next one, of rows g (0, 1) and g + 8 (2, 3)
__device__ __forceinline__ void first_layer(float (&v)[4], const int (&sums)[4], const u8* rest, int j, int t) {
  const float4 s = *(const float4*)(rest + AFFINE_AT - SHARED_FROM + (j * 8 + 2 * t) * 8);
  // two roundings, as in the reference: no fused multiply-add
  v[0] = __fadd_rn(__fmul_rn(__int2float_rn(sums[0]), s.x), s.y);
  v[1] = __fadd_rn(__fmul_rn(__int2float_rn(sums[1]), s.z), s.w);
  v[2] = __fadd_rn(__fmul_rn(__int2float_rn(sums[2]), s.x), s.y);
  v[3] = __fadd_rn(__fmul_rn(__int2float_rn(sums[3]), s.z), s.w);
}

__device__ __forceinline__ float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
  return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}

__device__ __forceinline__ float quad_sum(float v) {
  v += __shfl_xor_sync(~0u, v, 1);
  return v + __shfl_xor_sync(~0u, v, 2);
}

__device__ __forceinline__ void store(void* out, i64 index, float v) {
  if constexpr (VALUE_BITS == 16) ((u16*)out)[index] = half_of(v);
  else ((float*)out)[index] = v;
}

// the answers for one tile from its logits; lane (g, t) has columns 8 j + 2 t and the next one
template <int N> __device__ __forceinline__ void answer(float (&c)[N][4], const Place& at, i64 row0, int lane) {
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
          ((float2*)at.out)[row] = make_float2(1.f - p, p);
        } else {
          ((ID*)at.out)[row] = z > 0.f;
          if constexpr (OUTPUT == MARGIN) ((float*)at.out2)[row] = fabsf(z);
        }
      }
    } else if constexpr (OUTPUT == CLASS || OUTPUT == MARGIN) {
      float best = -INFINITY, second = -INFINITY;
      int id = 0;
#pragma unroll
      for (int j = 0; j < N; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int column = 8 * j + 2 * t + i;
          const float v = 8 * j + 8 <= CLASSES || column < CLASSES ? c[j][2 * r + i] : -INFINITY;
          if constexpr (OUTPUT == MARGIN) second = fmaxf(second, fminf(best, v));
          if (v > best) { best = v; id = column; }
        }
#pragma unroll
      for (int m = 1; m < 4; m *= 2) {
        const float other = __shfl_xor_sync(~0u, best, m);
        const int other_id = __shfl_xor_sync(~0u, id, m);
        if constexpr (OUTPUT == MARGIN)
          second = fmaxf(fmaxf(second, __shfl_xor_sync(~0u, second, m)), fminf(best, other));
        if (other > best || (other == best && other_id < id)) { best = other; id = other_id; }
      }
      if (mine && t == 0) {
        ((ID*)at.out)[row] = (ID)id;
        if constexpr (OUTPUT == MARGIN) ((float*)at.out2)[row] = best - second;
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
          if (mine && (8 * j + 8 <= CLASSES || column < CLASSES)) store(at.out, row * CLASSES + column, v);
        }
    }
  }
}

// later layers L ..: the C fragments of one layer are, rounded to float16, the A fragments of the next
template <int L, int KB> __device__ __forceinline__ void later(const u32 (&a)[KB][4], const u8* rest, const Place& at, i64 row0, int lane) {
  constexpr int N = (widths[L + 1] + 7) / 8, A = activations[L + 1];
  const int t = lane & 3;
  float c[N][4];
#pragma unroll
  for (int j = 0; j < N; j++) {
    const float2 b = *(const float2*)(rest + biases[L] - SHARED_FROM + (j * 8 + 2 * t) * 4);
    c[j][0] = c[j][2] = b.x;
    c[j][1] = c[j][3] = b.y;
  }
#pragma unroll
  for (int k = 0; k < KB; k++)
#pragma unroll
    for (int j = 0; j < N; j++) mma_half(c[j], a[k], *(const uint2*)(rest + weights[L] - SHARED_FROM + ((k * N + j) * 32 + lane) * 8));
  if constexpr (L + 1 == LATER) {
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) c[j][i] = activate<A>(c[j][i]);
    answer(c, at, row0, lane);
  } else {
    constexpr int NEXT = (N + 1) / 2;
    u32 h[NEXT][4] = {};
#pragma unroll
    for (int j = 0; j < N; j++) {
      h[j / 2][j % 2 * 2] = halves<A>(c[j][0], c[j][1]);
      h[j / 2][j % 2 * 2 + 1] = halves<A>(c[j][2], c[j][3]);
    }
    later<L + 1>(h, rest, at, row0, lane);
  }
}

__device__ __forceinline__ void finish(const int (&sums)[NB][4], const u8* rest, const Place& at, i64 row0, int lane) {
  constexpr int A = activations[0];
  if constexpr (LATER == 0) {
    float c[NB][4];
#pragma unroll
    for (int j = 0; j < NB; j++) {
      first_layer(c[j], sums[j], rest, j, lane & 3);
#pragma unroll
      for (int i = 0; i < 4; i++) c[j][i] = activate<A>(c[j][i]);
    }
    answer(c, at, row0, lane);
  } else {
    u32 h[(NB + 1) / 2][4] = {};
#pragma unroll
    for (int j = 0; j < NB; j++) {
      float v[4];
      first_layer(v, sums[j], rest, j, lane & 3);
      h[j / 2][j % 2 * 2] = halves<A>(v[0], v[1]);
      h[j / 2][j % 2 * 2 + 1] = halves<A>(v[2], v[3]);
    }
    later<0>(h, rest, at, row0, lane);
  }
}

// ---- paths ----------------------------------------------------------------------------------------------------------

// packed[SHARED_FROM ..] to shared memory; no barrier
__device__ __forceinline__ void copy_weights(u8* to, const u8* packed) {
  for (int i = SHARED_FROM + 16 * threadIdx.x; i < PACKED_BYTES; i += 16 * THREADS)
    *(uint4*)(to + i - SHARED_FROM) = __ldg((const uint4*)(packed + i));
}

#define PARAMETERS                                                                                                  \
  const u8 *__restrict__ x, i64 stride, const u8 *__restrict__ packed, void *__restrict__ out, void *__restrict__ out2, \
      i64 rows, const i64 *__restrict__ table, int batches

#if PATH == 0  // DIRECT: rows go from global memory to registers, STAGES units ahead

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) gigamlp_fused(PARAMETERS) {
  extern __shared__ __align__(128) u8 shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  copy_weights(shared, packed);
  __syncthreads();
  const u8* codes = SHARED_FROM == 0 ? shared : packed;
  const u8* rest = SHARED_FROM < PACKED_BYTES ? shared : packed + SHARED_FROM;
  const Job job{x, out, out2, stride, rows, table, (u32)((rows + ROWS - 1) / ROWS)};
  const u32 steps = job.per_batch * batches;
  for (u32 step = warp * gridDim.x + blockIdx.x; step < steps; step += gridDim.x * WARPS) {
    const Place at = find(job, step);
    if (at.first >= at.rows) continue;
    const u8* p[2 * TILES];
    const u8* end = at.x + (at.rows - 1) * stride + K_OFFSET + K;
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) p[i] = at.x + min(at.first + g + 8 * i, at.rows - 1) * stride + K_OFFSET;
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
          multiply(sums, ahead[s], codes + (u + s) * FRAGMENTS, lane);
          if (u + s + STAGES < UNITS)
#pragma unroll
            for (int i = 0; i < 2 * TILES; i++) ahead[s][i] = row_at<16>(p[i] + unit_at(u + s + STAGES, t), end);
        }
    if (HAS_8) multiply(sums, last_8, codes + CODES_8, lane);
    if (HAS_4) multiply(sums, last_4, codes + CODES_4, lane);
#pragma unroll
    for (int m = 0; m < TILES; m++) finish(sums[m], rest, at, at.first + 16 * m, lane);
  }
}

#elif PATH == 3  // SPLIT: 16 rows a block, features split over its warps, codes from L2 beside the rows: for small batches

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

#else  // RING, WINDOW: each warp has its own ring of STAGES slots, which bulk copies fill. No warp waits for another.

constexpr int PITCH = PATH == RING ? FEATURES : K + (K / 16 % 2 ? 0 : 16);  // of a row in a slot; odd / 16: no conflicts
constexpr int SLOT = (ROWS * PITCH + 15) / 16 * 16 + (ALIGN == 16 ? 0 : 32);  // reads may go past the last row

__device__ __forceinline__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void wait(u32 barrier, u32 phase) {
  asm volatile("{\n.reg .pred done;\nagain: mbarrier.try_wait.parity.shared::cta.b64 done,[%0],%1;\n@!done bra again;\n}"
               ::"r"(barrier), "r"(phase) : "memory");
}

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void bulk_copy(u32 to, const u8* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// begin to fill a slot with the rows of a step; the whole warp calls it
__device__ __forceinline__ void fill(const Job& job, u32 step, u8* slot, u32 barrier, int lane) {
  const Place at = find(job, step);
  const i64 left = at.rows - at.first;
  const int count = left < 0 ? 0 : left < ROWS ? (int)left : ROWS;
  const u8* from = at.x + at.first * job.stride;
  if constexpr (PATH == RING) {
    const u32 bytes = count * FEATURES, bulk = bytes & ~15u;
    if constexpr (FEATURES % 16 != 0) {  // the last rows of a batch may end between multiples of 16
      if (bulk + lane < bytes) slot[bulk + lane] = __ldg(from + bulk + lane);
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // before a later bulk copy to the same place
    }
    if (lane == 0) {
      expect(barrier, bulk);
      if (bulk) bulk_copy(address(slot), from, bulk, barrier);
    }
  } else {
    if (lane == 0) expect(barrier, count * K);
    __syncwarp();
    for (int r = lane; r < count; r += 32) bulk_copy(address(slot + r * PITCH), from + r * job.stride + K_OFFSET, K, barrier);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) gigamlp_fused(PARAMETERS) {
  extern __shared__ __align__(128) u8 shared[];
  u8* copied = shared + WARPS * STAGES * SLOT;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  u8* slots = shared + warp * STAGES * SLOT;
  u64* barriers = (u64*)(copied + PACKED_BYTES - SHARED_FROM) + warp * STAGES;
  const Job job{x, out, out2, PATH == RING ? FEATURES : stride, rows, table, (u32)((rows + ROWS - 1) / ROWS)};
  const u32 steps = job.per_batch * batches, hop = gridDim.x * WARPS;
  u32 step = warp * gridDim.x + blockIdx.x;  // few rows are spread over all multiprocessors
  if (lane == 0) {
    for (int s = 0; s < STAGES; s++) asm volatile("mbarrier.init.shared::cta.b64 [%0],1;" ::"r"(address(barriers + s)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncwarp();
  for (int s = 0; s < STAGES; s++)
    if (step + s * hop < steps) fill(job, step + s * hop, slots + s * SLOT, address(barriers + s), lane);
  copy_weights(copied, packed);
  __syncthreads();
  const u8* codes = SHARED_FROM == 0 ? copied : packed;
  const u8* rest = copied;
  int stage = 0;
  u32 phase = 0;
  for (; step < steps; step += hop) {
    u8* slot = slots + stage * SLOT;
    const u32 barrier = address(barriers + stage);
    wait(barrier, phase);
    const u8* row = slot + g * PITCH + (PATH == RING ? K_OFFSET : 0);
    Sums sums;
    clear(sums);
#pragma unroll(WIDE <= 4 ? 4 : 3)
    for (int c = 0; c < WIDE; c++)
#pragma unroll
      for (int q = 0; q < 2; q++) {
        Words<16> a[2 * TILES];
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++) a[i] = row_at<16>(row + 8 * i * PITCH + c * 128 + t * 32 + q * 16, nullptr);
        multiply(sums, a, codes + (2 * c + q) * FRAGMENTS, lane);
      }
    if constexpr (UNITS > 2 * WIDE) {
      Words<16> a[2 * TILES];
#pragma unroll
      for (int i = 0; i < 2 * TILES; i++) a[i] = row_at<16>(row + 8 * i * PITCH + unit_at(2 * WIDE, t), nullptr);
      multiply(sums, a, codes + 2 * WIDE * FRAGMENTS, lane);
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
    if (HAS_8) multiply(sums, a8, codes + CODES_8, lane);
    if (HAS_4) multiply(sums, a4, codes + CODES_4, lane);
    const Place at = find(job, step);
#pragma unroll
    for (int m = 0; m < TILES; m++) finish(sums[m], rest, at, at.first + 16 * m, lane);
    if (++stage == STAGES) { stage = 0; phase ^= 1; }
  }
}

#endif
