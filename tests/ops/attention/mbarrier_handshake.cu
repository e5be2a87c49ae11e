// Memory handed over between two groups of 128 threads by mbarriers, there and back; right and wrong.
//
//   nvcc -O2 -arch=sm_90a -lineinfo mbarrier_handshake.cu && compute-sanitizer --tool racecheck ./a.out 1
//
// Arguments: which (0 to 4, see main), blocks, rounds. Nobody waits for ever in any of them.
#include <cstdint>
#include <cstdio>
#include <cstdlib>

__device__ __forceinline__ uint32_t at(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void init(uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at(barrier)), "r"(count) : "memory");
}

__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at(barrier)) : "memory");
}

__device__ __forceinline__ void wait(uint64_t* barrier, int parity) {
  asm volatile(
      "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again; }" ::"r"(
          at(barrier)),
      "r"(parity)
      : "memory");
}

enum Who { EVERY_THREAD, ONE_AFTER_MEETING, ONE };

template <int WHO, int GROUP>
__device__ __forceinline__ void tell(uint64_t* barrier) {
  if (WHO == ONE_AFTER_MEETING) asm volatile("bar.sync %0, 128;" ::"n"(GROUP + 1) : "memory");
  if (WHO == EVERY_THREAD || threadIdx.x % 128 == 0) arrive(barrier);
}

template <int WHO, bool PDL>
__global__ void hand_over(int rounds, int* wrong) {
  __shared__ volatile int memory[2][128];
  __shared__ uint64_t ready[2], back[2];
  int t = threadIdx.x % 128, count = WHO == EVERY_THREAD ? 128 : 1, bad = 0;
  if (threadIdx.x == 0)
    for (int i = 0; i < 2; i++) init(&ready[i], count), init(&back[i], count);
  __syncthreads();
#pragma unroll 1
  for (int r = 0; r < rounds; r++) {
    int b = r & 1, phase = (r >> 1) & 1;
    if (threadIdx.x >= 128) {
      wait(&back[b], phase ^ 1);
      memory[b][t] = r * 128 + t;
      tell<WHO, 1>(&ready[b]);
    } else {
      int got = 0;
      if (PDL) got = memory[b][127 - t];
      wait(&ready[b], phase);
      if (!PDL) got = memory[b][127 - t];
      bad += got != r * 128 + 127 - t;
      tell<WHO, 0>(&back[b]);
    }
    if (WHO == ONE) __syncthreads();  // or somebody might miss a phase
  }
  if (bad) atomicAdd(wrong, bad);
}

template <int WHO, bool PDL>
void run(const char* name, int blocks, int rounds) {
  int *wrong, host = -1;
  cudaMalloc(&wrong, 4);
  cudaMemset(wrong, 0, 4);
  hand_over<WHO, PDL><<<blocks, 256>>>(rounds, wrong);
  cudaError_t error = cudaDeviceSynchronize();
  cudaMemcpy(&host, wrong, 4, cudaMemcpyDeviceToHost);
  printf("@ %s: %d of %lld values wrong %s\n", name, host, (long long)blocks * rounds * 128,
         error ? cudaGetErrorString(error) : "");
}

int main(int n, char** v) {
  int which = n > 1 ? atoi(v[1]) : 0, blocks = n > 2 ? atoi(v[2]) : 1, rounds = n > 3 ? atoi(v[3]) : 12;
  switch (which) {
    case 0: run<EVERY_THREAD, false>("right, every thread arrives", blocks, rounds); break;
    case 1: run<ONE_AFTER_MEETING, false>("right, one thread arrives after a barrier of its group", blocks, rounds); break;
    case 2: run<ONE, false>("wrong, one thread arrives without that barrier", blocks, rounds); break;
    case 3: run<EVERY_THREAD, true>("wrong, every thread arrives, reads before waiting", blocks, rounds); break;
    case 4: run<ONE_AFTER_MEETING, true>("wrong, one thread arrives, reads before waiting", blocks, rounds); break;
  }
}
