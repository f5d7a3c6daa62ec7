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
#define METHOD DEVICE

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

#if __CUDA_ARCH__ >= 800
// float32 sums[16][8] += bfloat16 a[16][16] x b[16][8]
DEVICE void mma_bfloat_k16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

DEVICE void mma_bfloat_k8(float (&c)[4], u32 a0, u32 a1, u32 b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(b));
}

// float32 sums[16][8] += tf32 a[16][8] x b[8][8]
DEVICE void mma_tf32_k8(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

DEVICE void mma_tf32_k4(float (&c)[4], u32 a0, u32 a1, u32 b) {
  asm volatile("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(b));
}

// rounded to the 10 digits of tf32, ties away from 0
DEVICE u32 tf32_of(float v) {
  u32 r;
  asm("cvt.rna.tf32.f32 %0,%1;" : "=r"(r) : "f"(v));
  return r;
}
#endif

// two float16 each
DEVICE u32 subtract_halves(u32 a, u32 b) {
  u32 d;
  asm("sub.rn.f16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
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

// The same as an ordinary load, which the compiler may not put off beyond the next barrier: nearer to its use it would
// need fewer registers, and be waited for.
DEVICE uint4 load_here(const u8* p) {
  uint4 v;
  asm volatile("ld.global.L2::256B.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}

// what *cell was before `more` was added to it
DEVICE u32 count_more(u32* cell, u32 more) { return atomicAdd(cell, more); }

// one store of 8 bytes, which the host never sees in part
DEVICE void store_packet(void* out, i64 index, u32 value, u32 serial) {
  asm volatile("st.relaxed.sys.global.u64 [%0],%1;" ::"l"((u64*)out + index), "l"((u64)serial << 32 | value) : "memory");
}

#if __CUDA_ARCH__ >= 900
DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void wait_for_dependencies() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
template <class T> DEVICE void hide(T*& p) { asm volatile("" : "+l"(p)::"memory"); }

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE void barrier_init(u32 barrier, u32 arrivals = 1) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

DEVICE void barrier_arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _,[%0];" ::"r"(barrier) : "memory"); }

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

// the same place of every block of the cluster that `blocks` has a bit for, and the barrier there
DEVICE void bulk_copy_to(u32 blocks, u32 to, const u8* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0],[%1],%2,[%3],%4;"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"((unsigned short)blocks) : "memory");
}

// blocks of a cluster
#define CLUSTER_OF(n) __cluster_dims__(n, 1, 1)

DEVICE u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0,%%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// what a thread wrote before it arrives is there for all that have waited
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// the address in the cluster of what has `address` in block `rank`
DEVICE u32 other_block(u32 address, u32 rank) {
  u32 found;
  asm volatile("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(found) : "r"(address), "r"(rank));
  return found;
}

// 16 bytes to another block's shared memory; `barrier` there counts them when they have come
DEVICE void send(u32 to, const float (&v)[4], u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0],{%1,%2,%3,%4},[%5];"
               ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(barrier) : "memory");
}

DEVICE void barrier_wait_cluster(u32 barrier, u32 phase) {
  asm volatile("{\n.reg .pred done;\nagain: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done,[%0],%1;\n@!done bra again;\n}"
               ::"r"(barrier), "r"(phase) : "memory");
}

// to a barrier of any block of the cluster
DEVICE void arrive_at(u32 barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _,[%0];" ::"r"(barrier) : "memory");
}

// What wgmma multiplies rows with, at `address` in shared memory: core matrices of 8 outputs x 16 features, 128 bytes
// each and not swizzled, the two of 32 features side by side (leading offset 128), then the next 8 outputs (stride 256).
DEVICE u64 matrix_at(u32 address) {  // in a cluster, the upper bits of an address say which block's memory it is
  return (address & 0x3FFFF) >> 4 | (u64)(128 >> 4) << 16 | (u64)(256 >> 4) << 32;
}

// The operands of a wgmma are four registers in a row, of two rows' loads. A plain copy there is done by the compiler as
// soon as a load is issued, which then waits for it; an operation that it cannot see through stays where it is used.
DEVICE u32 used_now(u32 word, u32 zero) {
  u32 same;
  asm volatile("xor.b32 %0,%1,%2;" : "=r"(same) : "r"(word), "r"(zero));
  return same;
}

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
#endif
