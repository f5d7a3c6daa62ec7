// CUDA for the host, as far as the fused kernel needs it: its text compiles behind this header with a C++ compiler and
// runs one block at a time. Threads are fibres; what a warp does together waits until all 32 have come. The functions
// of ptx.cuh follow the tables of the PTX manual ("Matrix Fragments for mma...", "cp.async.bulk", "mbarrier").
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
#define __device__
#define __global__
#define __shared__
#define __align__(n)
#define __launch_bounds__(...)

struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
using std::min;

constexpr int SHARED_BYTES = 1 << 18;
alignas(128) u8 shared[SHARED_BYTES];
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
static Meeting everyone;
static ucontext_t scheduler;
static u64 idle;

static void yield() {
  const u32 me = threadIdx.x;
  if (++idle > 50000000) fail("nobody can go on");
  swapcontext(&fibers[me].context, &scheduler);
  threadIdx.x = me;
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

static Meeting& warp() { return warps[threadIdx.x / 32]; }
static inline void __syncthreads() { meet(everyone, "syncthreads"); }
static inline void __syncwarp() { meet(warp(), "syncwarp"); }

template <class T> T __shfl_xor_sync(u32, T value, int mask) {
  static T values[1024];
  const u32 me = threadIdx.x;
  values[me] = value;
  meet(warp(), "shfl");
  const T found = values[me ^ mask];
  meet(warp(), "shfl end");
  return found;
}

// ---- memory ---------------------------------------------------------------------------------------------------------

template <class T> T __ldg(const T* p) { return *p; }
DEVICE uint4 load_once(const u8* p) { return *(const uint4*)p; }
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

struct Barrier { int arrived; i64 bytes; u32 phase; };
struct Copy { u32 to; const u8* from; u32 bytes; };
static std::map<u32, Barrier> barriers;
static std::map<u32, std::vector<Copy>> copies;
static bool late;

static void settle(Barrier& b) {
  if (b.arrived && b.bytes == 0) { b.arrived = 0; b.phase++; idle = 0; }
}

static Barrier& known(u32 barrier) {
  if (!barriers.count(barrier)) fail("a barrier that was not made");
  return barriers[barrier];
}

static void deliver(u32 barrier, const Copy& copy) {
  memcpy(shared + copy.to, copy.from, copy.bytes);
  known(barrier).bytes -= copy.bytes;
  settle(known(barrier));
}

DEVICE u32 shared_address(const void* p) {
  const i64 at = (const u8*)p - shared;
  if (at < 0 || at >= SHARED_BYTES) fail("no address in shared memory");
  return at;
}

DEVICE void barrier_init(u32 barrier) {
  if (barrier % 8) fail("a barrier's address is no multiple of 8");
  barriers[barrier] = {};
}

DEVICE void barrier_expect(u32 barrier, u32 bytes) {
  Barrier& b = known(barrier);
  if (b.arrived) fail("a barrier is used again before its phase is over");
  b.arrived = 1;
  b.bytes += bytes;
  settle(b);
}

DEVICE void barrier_wait(u32 barrier, u32 phase) {
  std::vector<Copy> due;
  due.swap(copies[barrier]);
  for (const Copy& copy : due) deliver(barrier, copy);
  while ((known(barrier).phase & 1) == phase) yield();
}

DEVICE void fence_barrier_init() {}
DEVICE void fence_async() {}

DEVICE void bulk_copy(u32 to, const u8* from, u32 bytes, u32 barrier) {
  if (to % 16 || (u64)from % 16 || bytes % 16 || bytes == 0) fail("a bulk copy is not of whole multiples of 16");
  if (to + bytes > SHARED_BYTES) fail("a bulk copy leaves shared memory");
  if (late) copies[barrier].push_back({to, from, bytes});
  else deliver(barrier, {to, from, bytes});
}

// ---- launches that overlap ------------------------------------------------------------------------------------------

struct Pages { u8* begin; size_t size; };
static std::vector<Pages> withheld;  // rows and answers: earlier launches are at work on them until they are waited for

static void withhold(bool yes) {
  for (const Pages& p : withheld)
    if (mprotect(p.begin, p.size, yes ? PROT_NONE : PROT_READ | PROT_WRITE)) exit(6);
}

DEVICE void launch_dependents() {}
DEVICE void wait_for_dependencies() { meet(everyone, "wait for dependencies", [] { withhold(false); }); }
template <class T> DEVICE void hide(T*&) {}

// ---- arithmetic -----------------------------------------------------------------------------------------------------

static inline u32 __float_as_uint(float v) { u32 bits; memcpy(&bits, &v, 4); return bits; }
static inline float __int2float_rn(int v) { return (float)v; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
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

struct Operands { u32 a[4], b[2]; int* ints[4]; float* floats; };
static Operands operands[1024];

#if SIGNED_ROWS
typedef int8_t RowByte;
#else
typedef u8 RowByte;
#endif

// The fragments of the manual. Bytes: lane (g, t) has in word i of A row g + 8 (i % 2), columns 4 t .. 4 t + 3 (+ 16
// from word 2 on), in word i of B rows 4 t .. (+ 16 in word 1) of column g, and of C rows g (0, 1) and g + 8 (2, 3),
// columns 2 t and 2 t + 1. float16: two elements a word, columns 2 t, 2 t + 1 (+ 8 from word 2 of A and 1 of B on).
template <int M, int KK> static void mma_bytes(const char* name) {
  const u32 base = threadIdx.x / 32 * 32;
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

template <int KK> static void mma_half_(const char* name) {
  const u32 base = threadIdx.x / 32 * 32;
  meet(warp(), name, [base] {
    double a[16][16], b[16][8];
    for (int lane = 0; lane < 32; lane++) {
      const Operands& o = operands[base + lane];
      const int g = lane / 4, t = lane % 4;
      for (int i = 0; i < KK / 4; i++)
        for (int k = 0; k < 2; k++) a[g + 8 * (i % 2)][t * 2 + k + 8 * (i / 2)] = float_of((u16)(o.a[i] >> 16 * k));
      for (int i = 0; i < KK / 8; i++)
        for (int k = 0; k < 2; k++) b[t * 2 + k + 8 * i][g] = float_of((u16)(o.b[i] >> 16 * k));
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
  operands[threadIdx.x] = {{a0, a1, a2, a3}, {b0, b1}, {c, c + 1, c + 2, c + 3}, nullptr};
  mma_bytes<16, 32>("mma.m16n8k32");
}
DEVICE void mma_m16n8k16(int (&c)[4], u32 a0, u32 a1, u32 b) {
  operands[threadIdx.x] = {{a0, a1}, {b}, {c, c + 1, c + 2, c + 3}, nullptr};
  mma_bytes<16, 16>("mma.m16n8k16");
}
DEVICE void mma_m8n8k16(int& c0, int& c1, u32 a, u32 b) {
  operands[threadIdx.x] = {{a}, {b}, {&c0, &c1}, nullptr};
  mma_bytes<8, 16>("mma.m8n8k16");
}
DEVICE void mma_half_k16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  operands[threadIdx.x] = {{a0, a1, a2, a3}, {b0, b1}, {}, c};
  mma_half_<16>("mma.half.k16");
}
DEVICE void mma_half_k8(float (&c)[4], u32 a0, u32 a1, u32 b) {
  operands[threadIdx.x] = {{a0, a1}, {b}, {}, c};
  mma_half_<8>("mma.half.k8");
}
