/* What all parts of codec.c share: constants, error codes, and which instructions are used. */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define CG_ABI 4
#define LANES 32           /* rANS states of a stream; column c belongs to lane c % 32 */
#define GROUP 32           /* columns of symbols are padded to a multiple of this */
#define PROB_BITS 12       /* frequencies of a symbol model sum to 4096 */
#define SLOTS 4096
#define LOW 65536u         /* states live in [2^16, 2^32) between symbols */
#define ESCAPE (-128)      /* this symbol says: the value is in the list of escapes */
#define CONTEXTS 3

#if defined(__x86_64__) && defined(__GNUC__)
#define CG_X86 1
#include <immintrin.h>
#else
#define CG_X86 0
#endif

#ifdef _WIN32
#define API __declspec(dllexport)
#else
#define API __attribute__((visibility("default")))
#endif

#if defined(__GNUC__)
#define NOINLINE __attribute__((noinline)) /* keeps its few variables in registers */
#define ALWAYS_INLINE inline __attribute__((always_inline)) /* compiled for each instruction set that it is used in */
#else
#define NOINLINE
#define ALWAYS_INLINE inline
#endif

enum { CG_OK = 0, CG_TRUNCATED = -1, CG_CORRUPT = -2, CG_MEMORY = -3 };

API void *PyInit__codec(void) { return 0; } /* loaded with ctypes; some linkers want this name */
API int cg_abi(void) { return CG_ABI; }

static int isa = -1; /* 0 portable, 1 AVX2 + FMA + F16C, 2 AVX-512 as of Ice Lake and Zen 4 */

static int best_isa(void) {
#if CG_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512vnni"))
    return 2;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return 1;
#endif
  return 0;
}

static uint32_t compact[256][8]; /* AVX2: for a mask of lanes that read, which word of the next eight each gets */

/* Choose kernels: -1 the best this machine has, else at most `wanted`. Returns the choice. Call before any other. */
API int cg_set_isa(int wanted) {
  for (int m = 0; m < 256; m++)
    for (int i = 0, n = 0; i < 8; i++) compact[m][i] = (m >> i & 1) ? (uint32_t)n++ : 0;
  int best = best_isa();
  isa = wanted < 0 || wanted > best ? best : wanted;
  return isa;
}
