// The instructions that CUDA C++ has no word for, one function each. tests/kernels/cuda/host.h has the same functions
// for the host, so that the kernel's own text runs in tests on machines without a GPU.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define INFINITY __int_as_float(0x7f800000)
#if SIGNED_ROWS
#define ROW_TYPE "s8"
#else
#define ROW_TYPE "u8"
#endif
#define DEVICE __device__ __forceinline__

// int32 sums[16][8] += rows[16][32] x codes[32][8]
DEVICE void mma_m16n8k32(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32." ROW_TYPE ".s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

DEVICE void mma_m16n8k16(int (&c)[4], u32 a0, u32 a1, u32 b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.s32." ROW_TYPE ".s8.s32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(b));
}

DEVICE void mma_m8n8k16(int& c0, int& c1, u32 a, u32 b) {
  asm volatile("mma.sync.aligned.m8n8k16.row.col.s32." ROW_TYPE ".s8.s32 {%0,%1},{%2},{%3},{%0,%1};"
               : "+r"(c0), "+r"(c1) : "r"(a), "r"(b));
}

// float32 sums[16][8] += float16 a[16][16] x b[16][8]
DEVICE void mma_half_k16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

DEVICE void mma_half_k8(float (&c)[4], u32 a0, u32 a1, u32 b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(b));
}

DEVICE u16 half_of(float v) {
  u16 h;
  asm("cvt.rn.f16.f32 %0,%1;" : "=h"(h) : "f"(v));
  return h;
}

#if __CUDA_ARCH__ >= 800
DEVICE u32 two_halves(float low, float high) {
  u32 h;
  asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(h) : "f"(high), "f"(low));
  return h;
}

DEVICE u32 two_halves_relu(float low, float high) {
  u32 h;
  asm("cvt.rn.relu.f16x2.f32 %0,%1,%2;" : "=r"(h) : "f"(high), "f"(low));
  return h;
}
#endif

#if OVERLAP  // rows may change until earlier launches have ended
#define UNCHANGED ""
#else
#define UNCHANGED ".nc"
#endif

// 16 bytes that are read once; the L2 cache fetches 128 for the lanes beside
DEVICE uint4 load_once(const u8* p) {
  uint4 v;
  asm volatile("ld.global" UNCHANGED ".L2::128B.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// one store of 8 bytes, which the host never sees in part
DEVICE void store_packet(void* out, i64 index, u32 value, u32 serial) {
  asm volatile("st.relaxed.sys.global.u64 [%0],%1;" ::"l"((u64*)out + index), "l"((u64)serial << 32 | value) : "memory");
}

#if __CUDA_ARCH__ >= 900
DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void wait_for_dependencies() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
template <class T> DEVICE void hide(T*& p) { asm volatile("" : "+l"(p)::"memory"); }

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE void barrier_init(u32 barrier) { asm volatile("mbarrier.init.shared::cta.b64 [%0],1;" ::"r"(barrier) : "memory"); }

DEVICE void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(barrier), "r"(bytes) : "memory");
}

DEVICE void barrier_wait(u32 barrier, u32 phase) {
  asm volatile("{\n.reg .pred done;\nagain: mbarrier.try_wait.parity.shared::cta.b64 done,[%0],%1;\n@!done bra again;\n}"
               ::"r"(barrier), "r"(phase) : "memory");
}

DEVICE void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// what this thread wrote to shared memory comes before later bulk copies to the same place
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

DEVICE void bulk_copy(u32 to, const u8* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
#endif
