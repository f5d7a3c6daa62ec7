// CUDA for the host, as far as the fused kernel needs it: its text compiles behind this header with a C++ compiler and
// runs one cluster at a time. Threads are fibres; what a warp does together waits until all 32 have come. The functions
// of ptx.cuh follow the tables of the PTX manual ("Matrix Fragments for mma...", "cp.async.bulk", "mbarrier", "wgmma").
//
// What would go unnoticed on a GPU ends the program: accesses that are not aligned (-fsanitize=alignment), reads and
// writes past a buffer (a page without access follows each), bulk copies of odd sizes, lanes that meet in different
// instructions, barriers that nobody completes. With `late`, bulk copies arrive when they are waited for, not before.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <map>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE static inline
#define METHOD inline
#define __device__
#define __global__
#define __shared__
#define __align__(n)
#define __grid_constant__
#define __launch_bounds__(...)

struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
using std::min;

constexpr int SHARED_BYTES = 1 << 18;
constexpr u32 TOGETHER = CLUSTER * TEAMS;               // blocks of a cluster
alignas(128) static u8 memories[TOGETHER][SHARED_BYTES];
static u32 current;                                   // the block of the cluster whose thread runs
#define shared (memories[current])
struct { u32 x; } threadIdx, blockIdx, gridDim, blockDim;

[[noreturn]] static void fail(const char* what) {
  fprintf(stderr, "block %u thread %u: %s\n", blockIdx.x, threadIdx.x, what);
  exit(3);
}

// ---- threads --------------------------------------------------------------------------------------------------------

struct Fiber {
  ucontext_t context;
  std::vector<u8> stack;
  bool done;
};

struct Meeting {       // of a warp, or of a block
  int present, size;
  u32 count;           // meetings so far
  const char* purpose;
};

static std::vector<Fiber> fibers;
static std::vector<Meeting> warps;
static Meeting blocks[TOGETHER];
static u32 arrived, phase_of_cluster;
static ucontext_t scheduler;
static u64 idle;

static u32 number_of_thread() { return current * blockDim.x + threadIdx.x; }

static void be(u32 number) {
  blockIdx.x = blockIdx.x / TOGETHER * TOGETHER + number / blockDim.x;
  current = number / blockDim.x;
  threadIdx.x = number % blockDim.x;
}

static void yield() {
  const u32 me = number_of_thread();
  if (++idle > 50000000) fail("nobody can go on");
  swapcontext(&fibers[me].context, &scheduler);
  be(me);
}

static void meet(Meeting& at, const char* purpose, const std::function<void()>& then = {}) {
  if (at.present && strcmp(at.purpose, purpose)) fail("lanes meet in different instructions");
  at.purpose = purpose;
  const u32 count = at.count;
  if (++at.present == at.size) {
    if (then) then();
    at.present = 0;
    at.count++;
    idle = 0;
  } else {
    while (at.count == count) yield();
  }
}

static Meeting& warp() { return warps[number_of_thread() / 32]; }
static inline void __syncthreads() { meet(blocks[current], "syncthreads"); }
static inline void __syncwarp() { meet(warp(), "syncwarp"); }

template <class T> T __shfl_xor_sync(u32, T value, int mask) {
  static T values[1024 * TOGETHER];
  const u32 me = number_of_thread();
  values[me] = value;
  meet(warp(), "shfl");
  const T found = values[me ^ mask];
  meet(warp(), "shfl end");
  return found;
}

template <class T> T __shfl_sync(u32, T value, int lane) {
  static T values[1024 * CLUSTER];
  const u32 me = number_of_thread();
  values[me] = value;
  meet(warp(), "shfl from");
  const T found = values[me / 32 * 32 + lane];
  meet(warp(), "shfl from, end");
  return found;
}

static u32 __ballot_sync(u32, bool vote) {
  static u32 votes[1024 * CLUSTER];
  const u32 me = number_of_thread();
  votes[me] = vote;
  meet(warp(), "ballot");
  u32 found = 0;
  for (int lane = 0; lane < 32; lane++) found |= votes[me / 32 * 32 + lane] << lane;
  meet(warp(), "ballot end");
  return found;
}

static int __popc(u32 word) { return __builtin_popcount(word); }
static void __threadfence() {}
DEVICE u32 count_more(u32* cell, u32 more) {
  const u32 was = *cell;
  *cell += more;
  return was;
}

// ---- memory ---------------------------------------------------------------------------------------------------------

template <class T> T __ldg(const T* p) { return *p; }
DEVICE uint4 load_once(const u8* p) { return *(const uint4*)p; }
DEVICE uint4 load_here(const u8* p) { return *(const uint4*)p; }
DEVICE void store_packet(void* out, i64 index, u32 value, u32 serial) { ((u64*)out)[index] = (u64)serial << 32 | value; }

// a copy of `size` bytes that ends where a page without access begins, but for up to `align` - 1 bytes
static u8* guarded(const void* bytes, size_t size, size_t align) {
  const size_t page = sysconf(_SC_PAGESIZE), pages = (size + align + page - 1) / page + 1;
  u8* base = (u8*)mmap(nullptr, (pages + 1) * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED || mprotect(base, page, PROT_NONE) || mprotect(base + pages * page, page, PROT_NONE)) exit(4);
  u8* at = base + pages * page - (size + align - 1) / align * align;
  if (bytes) memcpy(at, bytes, size);
  else memset(at, 0xCD, size);
  return at;
}

struct Barrier { int arrived, needed; i64 bytes; u32 phase; };
struct Copy { u32 to; const u8* from; u32 bytes; };
static std::map<u32, Barrier> barriers;
static std::map<u32, std::vector<Copy>> copies;
static bool late;

static void settle(Barrier& b) {
  if (b.arrived == b.needed && b.bytes == 0) { b.arrived = 0; b.phase++; idle = 0; }
}

static Barrier& known(u32 barrier) {
  if (!barriers.count(barrier)) fail("a barrier that was not made");
  return barriers[barrier];
}

static void deliver(u32 barrier, const Copy& copy) {
  memcpy(memories[copy.to >> 24] + (copy.to & 0xFFFFFF), copy.from, copy.bytes);
  known(barrier).bytes -= copy.bytes;
  settle(known(barrier));
}

DEVICE u32 shared_address(const void* p) {
  const i64 at = (const u8*)p - shared;
  if (at < 0 || at >= SHARED_BYTES) fail("no address in shared memory");
  return at | current << 24;                          // as on the device: an address says which block's it is
}

DEVICE void barrier_init(u32 barrier, u32 arrivals = 1) {
  if (barrier % 8) fail("a barrier's address is no multiple of 8");
  barriers[barrier] = {0, (int)arrivals, 0, 0};
}

DEVICE void barrier_arrive(u32 barrier) {
  Barrier& b = known(barrier);
  if (b.arrived == b.needed) fail("too many arrive at a barrier");
  b.arrived++;
  settle(b);
}

DEVICE void barrier_expect(u32 barrier, u32 bytes) {
  Barrier& b = known(barrier);
  if (b.arrived == b.needed) fail("a barrier is used again before its phase is over");
  b.arrived++;
  b.bytes += bytes;
  settle(b);
}

DEVICE void barrier_wait(u32 barrier, u32 phase) {
  for (;;) {
    std::vector<Copy> due;
    due.swap(copies[barrier]);
    for (const Copy& copy : due) deliver(barrier, copy);
    if ((known(barrier).phase & 1) != phase) return;
    yield();
  }
}

DEVICE void fence_barrier_init() {}
DEVICE void fence_async() {}

DEVICE void bulk_copy(u32 to, const u8* from, u32 bytes, u32 barrier) {
  if (to % 16 || (u64)from % 16 || bytes % 16 || bytes == 0) fail("a bulk copy is not of whole multiples of 16");
  if ((to & 0xFFFFFF) + bytes > SHARED_BYTES) fail("a bulk copy leaves shared memory");
  if (late) copies[barrier].push_back({to, from, bytes});
  else deliver(barrier, {to, from, bytes});
}

// ---- clusters -------------------------------------------------------------------------------------------------------

#define CLUSTER_OF(n)
DEVICE void bulk_copy_to(u32 blocks, u32 to, const u8* from, u32 bytes, u32 barrier) {
  if (!phase_of_cluster) fail("something is sent to a block that may not have begun");
  if (!blocks || blocks >> TOGETHER) fail("a bulk copy goes to no block of the cluster");
  for (u32 i = 0; i < TOGETHER; i++)
    if (blocks >> i & 1) bulk_copy((to & 0xFFFFFF) | i << 24, from, bytes, (barrier & 0xFFFFFF) | i << 24);
}
DEVICE u32 cluster_rank() { return current; }
DEVICE u32 other_block(u32 address, u32 rank) { return (address & 0xFFFFFF) | rank << 24; }
DEVICE void barrier_wait_cluster(u32 barrier, u32 phase) { barrier_wait(barrier, phase); }

DEVICE void arrive_at(u32 barrier) { barrier_arrive(barrier); }

DEVICE void cluster_arrive() {
  if (++arrived == TOGETHER * blockDim.x) { phase_of_cluster++; idle = 0; }
}

DEVICE void cluster_wait() {
  while (phase_of_cluster == 0) yield();
}

// With `late`, what was sent comes when it is waited for.
DEVICE void send(u32 to, const float (&v)[4], u32 barrier) {
  if (to % 16 || to >> 24 != barrier >> 24) fail("what is sent is not aligned, or goes elsewhere than its barrier");
  if (!phase_of_cluster) fail("something is sent to a block that may not have begun");
  static std::vector<std::vector<u8>*> kept;
  kept.push_back(new std::vector<u8>((const u8*)v, (const u8*)v + 16));
  if (late) copies[barrier].push_back({to, kept.back()->data(), 16});
  else deliver(barrier, {to, kept.back()->data(), 16});
}
// ---- launches that overlap ------------------------------------------------------------------------------------------

struct Pages { u8* begin; size_t size; };
static std::vector<Pages> withheld;  // rows and answers: earlier launches are at work on them until they are waited for

static void withhold(bool yes) {
  for (const Pages& p : withheld)
    if (mprotect(p.begin, p.size, yes ? PROT_NONE : PROT_READ | PROT_WRITE)) exit(6);
}

DEVICE void launch_dependents() {}
DEVICE void wait_for_dependencies() { meet(blocks[current], "wait for dependencies", [] { withhold(false); }); }
template <class T> DEVICE void hide(T*&) {}

// ---- arithmetic -----------------------------------------------------------------------------------------------------

static inline u32 __float_as_uint(float v) { u32 bits; memcpy(&bits, &v, 4); return bits; }
static inline float __int2float_rn(int v) { return (float)v; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __uint_as_float(u32 v) {
  float f;
  memcpy(&f, &v, 4);
  return f;
}
static inline u32 __byte_perm(u32 low, u32 high, u32 which) {
  const u64 bytes = (u64)high << 32 | low;
  u32 found = 0;
  for (int i = 0; i < 4; i++) found |= (u32)(bytes >> (which >> 4 * i & 7) * 8 & 255) << 8 * i;
  return found;
}
static inline u32 __funnelshift_r(u32 low, u32 high, u32 shift) { return (u32)(((u64)high << 32 | low) >> (shift & 31)); }

DEVICE u16 half_of(float v) {
  const u16 sign = signbit(v) ? 0x8000 : 0;
  const double a = fabs((double)v);
  if (isnan(v)) return 0x7E00;
  if (a >= 65520) return sign | 0x7C00;
  if (a < 0x1p-14) return sign | (u16)nearbyint(a * 0x1p24);
  int e;
  const double m = frexp(a, &e);
  return sign | (u16)(((e + 14) << 10) + (int)nearbyint(m * 2048) - 1024);
}

static float float_of(u16 h) {
  const int e = h >> 10 & 31, m = h & 1023;
  const double a = e == 31 ? (m ? NAN : INFINITY) : e ? ldexp(1024 + m, e - 25) : ldexp(m, -24);
  return h & 0x8000 ? -a : a;
}

DEVICE u32 two_halves(float low, float high) { return half_of(low) | (u32)half_of(high) << 16; }
DEVICE u32 two_halves_relu(float low, float high) { return two_halves(fmaxf(low, 0), fmaxf(high, 0)); }

DEVICE u32 subtract_halves(u32 a, u32 b) {
  return two_halves(float_of((u16)a) - float_of((u16)b), float_of((u16)(a >> 16)) - float_of((u16)(b >> 16)));
}

DEVICE u32 tf32_of(float v) {
  u32 bits;
  memcpy(&bits, &v, 4);
  return isfinite(v) ? (bits + 0x1000) & ~0x1FFFu : bits;
}

struct Operands { u32 a[4], b[2]; int* ints[4]; float* floats; };
static Operands operands[1024 * TOGETHER];

#if SIGNED_ROWS
typedef int8_t RowByte;
#else
typedef u8 RowByte;
#endif

// The fragments of the manual. Bytes: lane (g, t) has in word i of A row g + 8 (i % 2), columns 4 t .. 4 t + 3 (+ 16
// from word 2 on), in word i of B rows 4 t .. (+ 16 in word 1) of column g, and of C rows g (0, 1) and g + 8 (2, 3),
// columns 2 t and 2 t + 1. float16 and bfloat16: two elements a word, columns 2 t, 2 t + 1 (+ 8 from word 2 of A and 1 of
// B on). tf32: one, column t (+ 4).
template <int M, int KK> static void mma_bytes(const char* name) {
  const u32 base = number_of_thread() / 32 * 32;
  meet(warp(), name, [base] {
    int a[16][32], b[32][8];
    for (int lane = 0; lane < 32; lane++) {
      const Operands& o = operands[base + lane];
      const int g = lane / 4, t = lane % 4, tall = M / 8;
      for (int i = 0; i < tall * KK / 16; i++)
        for (int k = 0; k < 4; k++) a[g + 8 * (i % tall)][t * 4 + k + 16 * (i / tall)] = (RowByte)(o.a[i] >> 8 * k);
      for (int i = 0; i < KK / 16; i++)
        for (int k = 0; k < 4; k++) b[t * 4 + k + 16 * i][g] = (int8_t)(o.b[i] >> 8 * k);
    }
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < M / 4; i++) {
        i64 sum = 0;
        for (int k = 0; k < KK; k++) sum += a[lane / 4 + 8 * (i / 2)][k] * b[k][lane % 4 * 2 + i % 2];
        const i64 total = *operands[base + lane].ints[i] + sum;
        if (total != (int)total) fail("an int32 sum overflows");
        *operands[base + lane].ints[i] = (int)total;
      }
  });
}

// number k of a word; tf32 operands must be rounded: what hardware does with the other digits is nobody's promise
static double half_in(u32 word, int k) { return float_of((u16)(word >> 16 * k)); }
static double bfloat_in(u32 word, int k) { return __uint_as_float(k ? word & 0xFFFF0000u : word << 16); }
static double tf32_in(u32 word, int) {
  if (word & 0x1FFF && isfinite(__uint_as_float(word))) fail("a tf32 operand is not rounded");
  return __uint_as_float(word);
}

// KK columns of A, EACH numbers a word: lane (g, t) has columns EACH t .. of each 4 EACH
template <int KK, int EACH> static void mma_floats(const char* name, double (*number)(u32, int)) {
  const u32 base = number_of_thread() / 32 * 32;
  meet(warp(), name, [base, number] {
    double a[16][16], b[16][8];
    for (int lane = 0; lane < 32; lane++) {
      const Operands& o = operands[base + lane];
      const int g = lane / 4, t = lane % 4;
      for (int i = 0; i < KK / EACH / 2; i++)
        for (int k = 0; k < EACH; k++) a[g + 8 * (i % 2)][t * EACH + k + 4 * EACH * (i / 2)] = number(o.a[i], k);
      for (int i = 0; i < KK / EACH / 4; i++)
        for (int k = 0; k < EACH; k++) b[t * EACH + k + 4 * EACH * i][g] = number(o.b[i], k);
    }
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < 4; i++) {
        double sum = operands[base + lane].floats[i];
        for (int k = 0; k < KK; k++) sum += a[lane / 4 + 8 * (i / 2)][k] * b[k][lane % 4 * 2 + i % 2];
        operands[base + lane].floats[i] = (float)sum;
      }
  });
}

DEVICE void mma_m16n8k32(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  operands[number_of_thread()] = {{a0, a1, a2, a3}, {b0, b1}, {c, c + 1, c + 2, c + 3}, nullptr};
  mma_bytes<16, 32>("mma.m16n8k32");
}
DEVICE void mma_m16n8k16(int (&c)[4], u32 a0, u32 a1, u32 b) {
  operands[number_of_thread()] = {{a0, a1}, {b}, {c, c + 1, c + 2, c + 3}, nullptr};
  mma_bytes<16, 16>("mma.m16n8k16");
}
DEVICE void mma_m8n8k16(int& c0, int& c1, u32 a, u32 b) {
  operands[number_of_thread()] = {{a}, {b}, {&c0, &c1}, nullptr};
  mma_bytes<8, 16>("mma.m8n8k16");
}
DEVICE void mma_half_k16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  operands[number_of_thread()] = {{a0, a1, a2, a3}, {b0, b1}, {}, c};
  mma_floats<16, 2>("mma.half.k16", half_in);
}
DEVICE void mma_half_k8(float (&c)[4], u32 a0, u32 a1, u32 b) {
  operands[number_of_thread()] = {{a0, a1}, {b}, {}, c};
  mma_floats<8, 2>("mma.half.k8", half_in);
}
DEVICE void mma_bfloat_k16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  operands[number_of_thread()] = {{a0, a1, a2, a3}, {b0, b1}, {}, c};
  mma_floats<16, 2>("mma.bfloat.k16", bfloat_in);
}
DEVICE void mma_bfloat_k8(float (&c)[4], u32 a0, u32 a1, u32 b) {
  operands[number_of_thread()] = {{a0, a1}, {b}, {}, c};
  mma_floats<8, 2>("mma.bfloat.k8", bfloat_in);
}
DEVICE void mma_tf32_k8(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  operands[number_of_thread()] = {{a0, a1, a2, a3}, {b0, b1}, {}, c};
  mma_floats<8, 1>("mma.tf32.k8", tf32_in);
}
DEVICE void mma_tf32_k4(float (&c)[4], u32 a0, u32 a1, u32 b) {
  operands[number_of_thread()] = {{a0, a1}, {b}, {}, c};
  mma_floats<4, 1>("mma.tf32.k4", tf32_in);
}

// wgmma: A as in mma.m16n8k32 or k16, 16 rows a warp. B in shared memory: a descriptor holds the address and the offsets
// from one half of its 32 bytes to the next and from 8 outputs to the next 8, in 16 bytes; core matrices are 8 x 16 bytes.
DEVICE u64 matrix_at(u32 address) { return (address & 0x3FFFF) >> 4 | (u64)(128 >> 4) << 16 | (u64)(256 >> 4) << 32; }
DEVICE u32 used_now(u32 word, u32 zero) { return word ^ zero; }
DEVICE void wgmma_fence() {}
DEVICE void wgmma_commit() {}
template <int N> DEVICE void wgmma_wait() {}

static const u8* half_row(u64 b, int output, int half) {
  return shared + (b & 0x3FFF) * 16 + output / 8 * (b >> 32 & 0x3FFF) * 16 + half * (b >> 16 & 0x3FFF) * 16 + output % 8 * 16;
}

template <int N> DEVICE void wgmma(int (&c)[N][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int add) {
  operands[number_of_thread()] = {{a0, a1, a2, a3}, {}, {&c[0][0]}, nullptr};
  const u32 base = number_of_thread() / 32 * 32;
  meet(warp(), "wgmma", [=] {
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < 4 * N; i++) {
        const int row = lane / 4 + 8 * (i % 4 / 2), output = i / 4 * 8 + lane % 4 * 2 + i % 2;
        int& sum = operands[base + lane].ints[0][i];
        if (!add) sum = 0;
        for (int k = 0; k < 32; k++) {
          const u32 word = operands[base + row % 8 * 4 + k % 16 / 4].a[row / 8 + k / 16 * 2];
          sum += (RowByte)(word >> k % 4 * 8) * (int8_t)half_row(b, output, k / 16)[k % 16];
        }
      }
  });
}

template <int N> DEVICE void wgmma_half(float (&c)[N][4], const u32 (&a)[4], u64 b) {
  operands[number_of_thread()] = {{a[0], a[1], a[2], a[3]}, {}, {}, &c[0][0]};
  const u32 base = number_of_thread() / 32 * 32;
  meet(warp(), "wgmma.half", [=] {
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < 4 * N; i++) {
        const int row = lane / 4 + 8 * (i % 4 / 2), output = i / 4 * 8 + lane % 4 * 2 + i % 2;
        double sum = operands[base + lane].floats[i];
        for (int k = 0; k < 16; k++) {
          const u32 word = operands[base + row % 8 * 4 + k % 8 / 2].a[row / 8 + k / 8 * 2];
          sum += float_of((u16)(word >> k % 2 * 16)) * float_of(((const u16*)half_row(b, output, k / 8))[k % 8]);
        }
        operands[base + lane].floats[i] = (float)sum;
      }
  });
}
