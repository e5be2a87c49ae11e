// Triton's matrix products for Intel's GPUs (DPAS: 8 rows, 16 columns, 16 terms) on a CPU.
//
// Lane n holds column n of b, two values of 16 bits in an int, and column n of the sums; lane k holds
// column k of a. Terms are added in float32 in their order; in which order a GPU adds them is not
// specified. The lanes of a sub-group are one vector here, so that what they write together they can
// read at once. Not inlined, because a kernel of many products takes minutes to compile then.
#pragma OPENCL EXTENSION cl_intel_subgroups : enable
#pragma OPENCL EXTENSION cl_khr_fp16 : enable

// One work-group runs at a time, of at most 64 sub-groups.
global float rows_of_a[64][8][16];

float of_float16(ushort x) { return (float)as_half(x); }
float of_bfloat16(ushort x) { return as_float((uint)x << 16); }

#define KEEP(VALUE, I) rows[I][lane] = VALUE(as_ushort(a.s##I));
#define TERM(I, K, VALUE) sums.s##I = fma(rows[I][K], VALUE, sums.s##I);
#define TERMS(K, VALUE)                                                                       \
  TERM(0, K, VALUE) TERM(1, K, VALUE) TERM(2, K, VALUE) TERM(3, K, VALUE)                     \
  TERM(4, K, VALUE) TERM(5, K, VALUE) TERM(6, K, VALUE) TERM(7, K, VALUE)
#define PAIR(VALUE, I)                                                                        \
  low = VALUE((ushort)(b.s##I & 0xffff));                                                     \
  TERMS(2 * I, low)                                                                           \
  high = VALUE((ushort)((uint)b.s##I >> 16));                                                 \
  TERMS(2 * I + 1, high)
#define EACH(DO, VALUE)                                                                       \
  DO(VALUE, 0) DO(VALUE, 1) DO(VALUE, 2) DO(VALUE, 3)                                         \
  DO(VALUE, 4) DO(VALUE, 5) DO(VALUE, 6) DO(VALUE, 7)

#define PRODUCT(NAME, VALUE)                                                                  \
  __attribute__((overloadable, noinline)) float8 NAME(short8 a, int8 b, float8 sums) {        \
    volatile global float(*rows)[16] = rows_of_a[get_sub_group_id()];                         \
    uint lane = get_sub_group_local_id();                                                     \
    float low, high;                                                                          \
    EACH(KEEP, VALUE)                                                                         \
    EACH(PAIR, VALUE)                                                                         \
    return sums;                                                                              \
  }

PRODUCT(intel_sub_group_bf16_bf16_matrix_mad_k16, of_bfloat16)
PRODUCT(intel_sub_group_f16_f16_matrix_mad_k16, of_float16)
