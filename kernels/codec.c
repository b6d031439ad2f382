/* The codec's inner loops for CPUs: symbol decoding and encoding, and from symbols to rows of an engine's cache.
 *
 * kernels/reference.py is the definition; kernels/README.md has the maths. Plain C11 without dependencies, called
 * through ctypes. Every entry point checks its input against the bounds it is given: a hostile bitstream yields an
 * error code, never a read or write outside the buffers. Kernels are compiled for AVX-512, for AVX2 and portably,
 * and chosen when the library is loaded (cg_set_isa).
 */
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

/* ---- rANS: 32 interleaved 32-bit states, 16-bit words, 12-bit frequencies, context-dependent symbol models ---- */

/* The context of an element: how large its neighbours are, against two thresholds of its component. `up` is the same
 * column of the token before, `left` the column 32 places before in the same token; 0 outside the block. */
static inline int context(int up, int left, int low, int high) {
  int m = 2 * (up < 0 ? -up : up) + (left < 0 ? -left : left);
  return (m > low) + (m > high);
}

typedef struct {
  const uint16_t *words;
  size_t n_words;
  const uint32_t *tables; /* [models][4096]: symbol & 0xff | frequency << 8 | (slot - start) << 20 */
  const int32_t *model;   /* [columns]: first of the three models (one a context) of each component */
  const int32_t *low, *high; /* [columns]: context thresholds */
  int64_t rows, columns;  /* columns % 32 == 0 */
  uint32_t *state;        /* [32] */
  int8_t *out;            /* [rows][columns] */
} Stream;

static const int8_t zero_row[GROUP];

/* Rows `row` and up, `column` and up of that row: one element at a time. */
static int decode_scalar(const Stream *s, int64_t row, int64_t column, size_t at) {
  for (int64_t r = row; r < s->rows; r++, column = 0) {
    int8_t *out = s->out + r * s->columns;
    const int8_t *up = r ? out - s->columns : NULL;
    for (int64_t c = column; c < s->columns; c++) {
      int k = context(up ? up[c] : 0, c >= GROUP ? out[c - GROUP] : 0, s->low[c], s->high[c]);
      uint32_t x = s->state[c % LANES];
      uint32_t e = s->tables[(size_t)(s->model[c] + k) * SLOTS + (x & (SLOTS - 1))];
      x = (e >> 8 & (SLOTS - 1)) * (x >> PROB_BITS) + (e >> 20);
      if (x < LOW) {
        if (at == s->n_words) return CG_TRUNCATED;
        x = x << 16 | s->words[at++];
      }
      s->state[c % LANES] = x;
      out[c] = (int8_t)e;
    }
  }
  if (at != s->n_words) return CG_CORRUPT;
  for (int i = 0; i < LANES; i++)
    if (s->state[i] != LOW) return CG_CORRUPT;
  return CG_OK;
}

#if CG_X86
__attribute__((target("avx2"))) static inline __m256i step8(__m256i x, const Stream *s, int64_t c, const int8_t *up,
                                                            const int8_t *left, size_t *at, int8_t *out) {
  __m256i u = _mm256_abs_epi32(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)up)));
  __m256i l = _mm256_abs_epi32(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)left)));
  __m256i m = _mm256_add_epi32(_mm256_add_epi32(u, u), l);
  __m256i k = _mm256_loadu_si256((const __m256i *)(s->model + c));
  k = _mm256_sub_epi32(k, _mm256_cmpgt_epi32(m, _mm256_loadu_si256((const __m256i *)(s->low + c))));
  k = _mm256_sub_epi32(k, _mm256_cmpgt_epi32(m, _mm256_loadu_si256((const __m256i *)(s->high + c))));
  __m256i slot = _mm256_and_si256(x, _mm256_set1_epi32(SLOTS - 1));
  __m256i e = _mm256_i32gather_epi32((const int *)s->tables, _mm256_or_si256(_mm256_slli_epi32(k, PROB_BITS), slot), 4);
  __m256i f = _mm256_and_si256(_mm256_srli_epi32(e, 8), _mm256_set1_epi32(SLOTS - 1));
  x = _mm256_add_epi32(_mm256_mullo_epi32(f, _mm256_srli_epi32(x, PROB_BITS)), _mm256_srli_epi32(e, 20));
  __m256i need = _mm256_cmpeq_epi32(_mm256_srli_epi32(x, 16), _mm256_setzero_si256());
  int mask = _mm256_movemask_ps(_mm256_castsi256_ps(need));
  __m256i w = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(s->words + *at)));
  w = _mm256_permutevar8x32_epi32(w, _mm256_loadu_si256((const __m256i *)compact[mask]));
  x = _mm256_blendv_epi8(x, _mm256_or_si256(_mm256_slli_epi32(x, 16), w), need);
  *at += (size_t)__builtin_popcount((unsigned)mask);
  const __m256i low = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8, 12, -1, -1,
                                       -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  e = _mm256_shuffle_epi8(e, low);
  uint32_t a = (uint32_t)_mm_cvtsi128_si32(_mm256_castsi256_si128(e));
  uint32_t b = (uint32_t)_mm_cvtsi128_si32(_mm256_extracti128_si256(e, 1));
  memcpy(out, &a, 4);
  memcpy(out + 4, &b, 4);
  return x;
}

__attribute__((target("avx2"))) static int decode_avx2(const Stream *s) {
  __m256i x[4];
  for (int i = 0; i < 4; i++) x[i] = _mm256_loadu_si256((const __m256i *)(s->state + 8 * i));
  size_t at = 0;
  int8_t *zeros = calloc((size_t)s->columns + 1, 1);
  if (!zeros) return CG_MEMORY;
  int64_t r = 0, c = 0;
  for (; r < s->rows; r++) {
    int8_t *out = s->out + r * s->columns;
    const int8_t *up = r ? out - s->columns : zeros;
    const int8_t *left = zero_row;
    for (c = 0; c < s->columns; c += GROUP) {
      if (s->n_words - at < GROUP) goto rest; /* the vector code reads up to 32 words ahead */
      x[0] = step8(x[0], s, c, up + c, left, &at, out + c);
      x[1] = step8(x[1], s, c + 8, up + c + 8, left + 8, &at, out + c + 8);
      x[2] = step8(x[2], s, c + 16, up + c + 16, left + 16, &at, out + c + 16);
      x[3] = step8(x[3], s, c + 24, up + c + 24, left + 24, &at, out + c + 24);
      left = out + c;
    }
  }
  c = 0;
rest:
  free(zeros);
  for (int i = 0; i < 4; i++) _mm256_storeu_si256((__m256i *)(s->state + 8 * i), x[i]);
  return decode_scalar(s, r, c, at);
}

__attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi2"))) static inline __m512i step16(
    __m512i x, const Stream *s, int64_t c, const int8_t *up, const int8_t *left, size_t *at, int8_t *out) {
  __m512i u = _mm512_abs_epi32(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)up)));
  __m512i l = _mm512_abs_epi32(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)left)));
  __m512i m = _mm512_add_epi32(_mm512_add_epi32(u, u), l);
  __m512i k = _mm512_loadu_si512(s->model + c);
  const __m512i one = _mm512_set1_epi32(1);
  k = _mm512_mask_add_epi32(k, _mm512_cmpgt_epi32_mask(m, _mm512_loadu_si512(s->low + c)), k, one);
  k = _mm512_mask_add_epi32(k, _mm512_cmpgt_epi32_mask(m, _mm512_loadu_si512(s->high + c)), k, one);
  __m512i slot = _mm512_and_si512(x, _mm512_set1_epi32(SLOTS - 1));
  __m512i e = _mm512_i32gather_epi32(_mm512_or_si512(_mm512_slli_epi32(k, PROB_BITS), slot), (const int *)s->tables, 4);
  __m512i f = _mm512_and_si512(_mm512_srli_epi32(e, 8), _mm512_set1_epi32(SLOTS - 1));
  x = _mm512_add_epi32(_mm512_mullo_epi32(f, _mm512_srli_epi32(x, PROB_BITS)), _mm512_srli_epi32(e, 20));
  __mmask16 need = _mm512_cmplt_epu32_mask(x, _mm512_set1_epi32(LOW));
  __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(s->words + *at)));
  w = _mm512_maskz_expand_epi32(need, w);
  x = _mm512_mask_or_epi32(x, need, _mm512_slli_epi32(x, 16), w);
  *at += (size_t)__builtin_popcount((unsigned)need);
  _mm_storeu_si128((__m128i *)out, _mm512_cvtepi32_epi8(e));
  return x;
}

__attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi2"))) static int decode_avx512(const Stream *s) {
  __m512i x0 = _mm512_loadu_si512(s->state), x1 = _mm512_loadu_si512(s->state + 16);
  size_t at = 0;
  int8_t *zeros = calloc((size_t)s->columns + 1, 1);
  if (!zeros) return CG_MEMORY;
  int64_t r = 0, c = 0;
  for (; r < s->rows; r++) {
    int8_t *out = s->out + r * s->columns;
    const int8_t *up = r ? out - s->columns : zeros;
    const int8_t *left = zero_row;
    for (c = 0; c < s->columns; c += GROUP) {
      if (s->n_words - at < GROUP) goto rest;
      x0 = step16(x0, s, c, up + c, left, &at, out + c);
      x1 = step16(x1, s, c + 16, up + c + 16, left + 16, &at, out + c + 16);
      left = out + c;
    }
  }
  c = 0;
rest:
  free(zeros);
  _mm512_storeu_si512(s->state, x0);
  _mm512_storeu_si512(s->state + 16, x1);
  return decode_scalar(s, r, c, at);
}
#endif

/* Decode a stream of rows x columns symbols. `states` holds 32 little-endian states as read from the stream. */
API int cg_decode(const uint16_t *words, size_t n_words, uint32_t *state, const uint32_t *tables, const int32_t *model,
                  const int32_t *low, const int32_t *high, int64_t rows, int64_t columns, int8_t *out) {
  Stream s = {words, n_words, tables, model, low, high, rows, columns, state, out};
  for (int i = 0; i < LANES; i++)
    if (state[i] < LOW) return CG_CORRUPT;
#if CG_X86
  if (isa == 2) return decode_avx512(&s);
  if (isa == 1) return decode_avx2(&s);
#endif
  return decode_scalar(&s, 0, 0, 0);
}

typedef struct {
  const int8_t *symbols; /* [rows][columns] */
  int64_t rows, columns;
  const uint32_t *code; /* [models][256]: frequency | start << 16, indexed by symbol & 0xff */
  const int32_t *model, *low, *high; /* as in Stream */
  uint32_t *state;
  uint16_t *words; /* room for rows * columns; written from the end */
} Symbols;

/* Elements `column - 1` and down of row `row`, then the rows before: one element at a time. */
static int64_t encode_scalar(const Symbols *s, int64_t row, int64_t column, int64_t at) {
  for (int64_t r = row; r >= 0; r--, column = s->columns) {
    const int8_t *out = s->symbols + r * s->columns, *up = r ? out - s->columns : NULL;
    for (int64_t c = column - 1; c >= 0; c--) {
      int k = context(up ? up[c] : 0, c >= GROUP ? out[c - GROUP] : 0, s->low[c], s->high[c]);
      uint32_t code = s->code[(size_t)(s->model[c] + k) * 256 + (uint8_t)out[c]], f = code & 0xffff;
      if (!f) return CG_CORRUPT;
      uint32_t v = s->state[c % LANES];
      if (v >> 20 >= f) {
        s->words[--at] = (uint16_t)v;
        v >>= 16;
      }
      s->state[c % LANES] = (v / f << PROB_BITS) + v % f + (code >> 16);
    }
  }
  return at;
}

#if CG_X86
/* Sixteen lanes. Words of a group of lanes lie in ascending order: the decoder reads them so. */
__attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi2"))) static inline __m512i put16(
    __m512i x, const Symbols *s, int64_t c, const int8_t *row, const int8_t *up, const int8_t *left, int64_t *at,
    __mmask16 *missing) {
  __m512i u = _mm512_abs_epi32(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(up + c))));
  __m512i l = _mm512_abs_epi32(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)left)));
  __m512i m = _mm512_add_epi32(_mm512_add_epi32(u, u), l);
  __m512i k = _mm512_loadu_si512(s->model + c);
  const __m512i one = _mm512_set1_epi32(1);
  k = _mm512_mask_add_epi32(k, _mm512_cmpgt_epi32_mask(m, _mm512_loadu_si512(s->low + c)), k, one);
  k = _mm512_mask_add_epi32(k, _mm512_cmpgt_epi32_mask(m, _mm512_loadu_si512(s->high + c)), k, one);
  __m512i symbol = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(row + c)));
  __m512i code = _mm512_i32gather_epi32(_mm512_or_si512(_mm512_slli_epi32(k, 8), symbol), (const int *)s->code, 4);
  __m512i f = _mm512_and_si512(code, _mm512_set1_epi32(0xffff));
  *missing |= _mm512_testn_epi32_mask(f, f);
  __mmask16 full = _mm512_cmpge_epu32_mask(_mm512_srli_epi32(x, 20), f);
  int n = __builtin_popcount((unsigned)full);
  *at -= n;
  __m256i low = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(full, x));
  _mm256_mask_storeu_epi16(s->words + *at, (__mmask16)((1u << n) - 1), low);
  x = _mm512_mask_srli_epi32(x, full, x, 16);
  /* x / f, rounded down, as (x + 1/2) * (1 / f) in double precision: half of 1 / f is left to the next integers, much more
   * than rounding can take. The divisions do not wait for x. */
  const __m512d unit = _mm512_set1_pd(1.0), half = _mm512_set1_pd(0.5);
  __m512d fa = _mm512_div_pd(unit, _mm512_cvtepi32_pd(_mm512_castsi512_si256(f)));
  __m512d fb = _mm512_div_pd(unit, _mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(f, 1)));
  __m512d xa = _mm512_cvtepu32_pd(_mm512_castsi512_si256(x)), xb = _mm512_cvtepu32_pd(_mm512_extracti64x4_epi64(x, 1));
  xa = _mm512_fmadd_pd(xa, fa, _mm512_mul_pd(half, fa));
  xb = _mm512_fmadd_pd(xb, fb, _mm512_mul_pd(half, fb));
  __m512i q = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvttpd_epu32(xa)), _mm512_cvttpd_epu32(xb), 1);
  __m512i rest = _mm512_sub_epi32(x, _mm512_mullo_epi32(q, f));
  return _mm512_add_epi32(_mm512_add_epi32(_mm512_slli_epi32(q, PROB_BITS), rest), _mm512_srli_epi32(code, 16));
}

__attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi2"))) static int64_t encode_avx512(const Symbols *s,
                                                                                              int64_t at) {
  __m512i x0 = _mm512_loadu_si512(s->state), x1 = _mm512_loadu_si512(s->state + 16);
  __mmask16 missing = 0;
  int8_t *zeros = calloc((size_t)s->columns + 1, 1);
  if (!zeros) return CG_MEMORY;
  for (int64_t r = s->rows - 1; r >= 0; r--) {
    const int8_t *row = s->symbols + r * s->columns, *up = r ? row - s->columns : zeros;
    for (int64_t c = s->columns - GROUP; c >= 0; c -= GROUP) {
      const int8_t *left = c ? row + c - GROUP : zero_row;
      x1 = put16(x1, s, c + 16, row, up, left + 16, &at, &missing);
      x0 = put16(x0, s, c, row, up, left, &at, &missing);
    }
  }
  free(zeros);
  _mm512_storeu_si512(s->state, x0);
  _mm512_storeu_si512(s->state + 16, x1);
  return missing ? CG_CORRUPT : at;
}
#endif

/* Encode. `code` is [models][256]: frequency | start << 16, indexed by symbol & 0xff. `words` has room for rows *
 * columns. Returns the number of words, written at the end of the buffer in the order the decoder reads them. Negative:
 * error (CG_CORRUPT: a symbol that its model does not have). */
API int64_t cg_encode(const int8_t *symbols, int64_t rows, int64_t columns, const uint32_t *code, const int32_t *model,
                      const int32_t *low, const int32_t *high, uint32_t *state, uint16_t *words) {
  Symbols s = {symbols, rows, columns, code, model, low, high, state, words};
  int64_t total = rows * columns, at;
  for (int i = 0; i < LANES; i++) state[i] = LOW;
#if CG_X86
  if (isa == 2)
    at = encode_avx512(&s, total);
  else
#endif
    at = encode_scalar(&s, rows - 1, columns, total);
  return at < 0 ? at : total - at;
}

/* ---- products in fixed point ---- */

/* Rows of float32 times a matrix of int16, as kernels/reference.py defines it: a row is scaled by a power of two to a
 * Euclidean norm of at most NORM and rounded to int16, the columns of the matrix are so too; by the Cauchy-Schwarz
 * inequality a product then fits 32 bits, whatever the order of its sum. Results are the same on every machine. */
#define NORM 32000.0
#define HUGE_NORM 0x1p60 /* of what no model produces */
#define ROWS 8           /* rows and columns of the product that are summed at a time */
#define COLS 32
#define BLOCK 48 /* rows at a time, a multiple of ROWS: small enough that a block's buffers stay in the cache */

typedef struct {
  const int16_t *pairs; /* [n / COLS][k / 2][COLS][2], padded with zeros */
  const float *scale;   /* [n]: units of the columns */
  int64_t k, n;
} Fixed;

static inline float power_of_two(int64_t exponent) {
  uint32_t bits = (uint32_t)(exponent + 127) << 23;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

/* The power of two that brings a row to a norm of NORM or less; CG_CORRUPT for a square of the norm that is too large. */
static inline int exponent_of(double square, int64_t *exponent) {
  if (!(square <= HUGE_NORM * HUGE_NORM)) return CG_CORRUPT;
  double room = square > 0 ? NORM * NORM / square : 1;
  int64_t bits;
  memcpy(&bits, &room, 8);
  bits = ((bits >> 52) - 1023) >> 1;
  *exponent = bits > 100 ? 100 : bits;
  return CG_OK;
}

/* Rows [rows][k] of floats to int16 [rows][even k], and the power of two by which each is to be multiplied back. With
 * `weight` [k], estimate[row] grows by the row's product with it. Returns CG_CORRUPT for a row with NaN, infinity or a
 * norm above HUGE_NORM. */
static ALWAYS_INLINE int to_fixed_body(const float *x, int64_t stride, int64_t rows, int64_t k, const double *weight,
                                       double *estimate, int16_t *out, float *back) {
  int64_t even = k + (k & 1);
  for (int64_t r = 0; r < rows; r++, x += stride, out += even) {
    double sum[8] = {0}, dot[8] = {0}; /* eight each: additions wait for one another */
    for (int64_t i = 0; i < k; i += 8)
      for (int64_t u = 0; u < (k - i < 8 ? k - i : 8); u++) {
        sum[u] += (double)x[i + u] * (double)x[i + u];
        if (weight) dot[u] += (double)x[i + u] * weight[i + u];
      }
    for (int u = 1; u < 8; u++) sum[0] += sum[u], dot[0] += dot[u];
    if (weight) estimate[r] += dot[0];
    int64_t e;
    if (exponent_of(sum[0], &e)) return CG_CORRUPT;
    float scale = power_of_two(e);
    back[r] = power_of_two(-e);
    out[even - 1] = 0;
    for (int64_t i = 0; i < k; i++) {
      float v = x[i] * scale + 12582912.0f; /* 1.5 * 2^23: rounds to the nearest integer, which its low bits then hold */
      int32_t bits;
      memcpy(&bits, &v, 4);
      out[i] = (int16_t)bits;
    }
  }
  return CG_OK;
}

static int to_fixed_portable(const float *x, int64_t stride, int64_t rows, int64_t k, const double *weight,
                             double *estimate, int16_t *out, float *back) {
  return to_fixed_body(x, stride, rows, k, weight, estimate, out, back);
}

/* A tile of a product: up to ROWS rows, COLS columns. */
typedef struct {
  const int16_t *a, *b; /* ROWS rows of k values; one group of columns of Fixed.pairs */
  int64_t k, rows, columns;
  const float *back, *scale, *add; /* units of the rows and of the columns, and what is added */
  float *out;
  int64_t stride;
} Tile;

static ALWAYS_INLINE void finish(const Tile *t, int32_t sum[ROWS][COLS]) {
  for (int64_t r = 0; r < t->rows; r++)
    for (int64_t c = 0; c < t->columns; c++)
      t->out[r * t->stride + c] = (float)sum[r][c] * t->back[r] * t->scale[c] + t->add[c];
}

static void product_portable(const Tile *t) {
  const int16_t *a = t->a, *b = t->b;
  int64_t k = t->k;
  int32_t sum[ROWS][COLS] = {{0}};
  for (int64_t p = 0; p < k / 2; p++)
    for (int r = 0; r < ROWS; r++)
      for (int j = 0; j < COLS; j++)
        sum[r][j] += a[r * k + 2 * p] * b[(p * COLS + j) * 2] + a[r * k + 2 * p + 1] * b[(p * COLS + j) * 2 + 1];
  finish(t, sum);
}

#if CG_X86
__attribute__((target("avx2"))) static int to_fixed_avx2(const float *x, int64_t stride, int64_t rows, int64_t k,
                                                         const double *weight, double *estimate, int16_t *out,
                                                         float *back) {
  return to_fixed_body(x, stride, rows, k, weight, estimate, out, back);
}

__attribute__((target("avx512f,avx512bw,avx512vl"))) static int to_fixed_avx512(const float *x, int64_t stride,
                                                                                int64_t rows, int64_t k,
                                                                                const double *weight, double *estimate,
                                                                                int16_t *out, float *back) {
  int64_t even = k + (k & 1), whole = k & ~(int64_t)15;
  __mmask16 rest = (__mmask16)((1u << (k & 15)) - 1);
  for (int64_t r = 0; r < rows; r++, x += stride, out += even) {
    __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd(), dot = _mm512_setzero_pd(), more = dot;
    for (int64_t i = 0; i < k; i += 16) {
      __mmask16 there = i < whole ? (__mmask16)~0u : rest;
      __m512 v = _mm512_maskz_loadu_ps(there, x + i);
      __m512d a = _mm512_cvtps_pd(_mm512_castps512_ps256(v));
      __m512d b = _mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1)));
      low = _mm512_fmadd_pd(a, a, low);
      high = _mm512_fmadd_pd(b, b, high);
      if (weight) {
        dot = _mm512_fmadd_pd(a, _mm512_maskz_loadu_pd((__mmask8)there, weight + i), dot);
        more = _mm512_fmadd_pd(b, _mm512_maskz_loadu_pd((__mmask8)(there >> 8), weight + i + 8), more);
      }
    }
    if (weight) estimate[r] += _mm512_reduce_add_pd(_mm512_add_pd(dot, more));
    int64_t e;
    if (exponent_of(_mm512_reduce_add_pd(_mm512_add_pd(low, high)), &e)) return CG_CORRUPT;
    back[r] = power_of_two(-e);
    __m512 scale = _mm512_set1_ps(power_of_two(e));
    out[even - 1] = 0;
    for (int64_t i = 0; i < k; i += 16) {
      __mmask16 there = i < whole ? (__mmask16)~0u : rest;
      __m512i v = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(there, x + i), scale));
      _mm256_mask_storeu_epi16(out + i, there, _mm512_cvtepi32_epi16(v));
    }
  }
  return CG_OK;
}

static inline int32_t pair_at(const int16_t *a) {
  int32_t pair;
  memcpy(&pair, a, 4);
  return pair;
}

__attribute__((target("avx2"))) static void product_avx2(const Tile *t) {
  const int16_t *a = t->a, *b = t->b;
  int64_t k = t->k;
  int32_t sum[ROWS][COLS];
  for (int r = 0; r < ROWS; r += 4)
    for (int j = 0; j < COLS; j += 16) {
      __m256i acc[4][2];
      for (int i = 0; i < 4; i++) acc[i][0] = acc[i][1] = _mm256_setzero_si256();
      for (int64_t p = 0; p < k / 2; p++) {
        __m256i b0 = _mm256_loadu_si256((const __m256i *)(b + (p * COLS + j) * 2));
        __m256i b1 = _mm256_loadu_si256((const __m256i *)(b + (p * COLS + j + 8) * 2));
        for (int i = 0; i < 4; i++) {
          __m256i v = _mm256_set1_epi32(pair_at(a + (r + i) * k + 2 * p));
          acc[i][0] = _mm256_add_epi32(acc[i][0], _mm256_madd_epi16(v, b0));
          acc[i][1] = _mm256_add_epi32(acc[i][1], _mm256_madd_epi16(v, b1));
        }
      }
      for (int i = 0; i < 4; i++) {
        _mm256_storeu_si256((__m256i *)&sum[r + i][j], acc[i][0]);
        _mm256_storeu_si256((__m256i *)&sum[r + i][j + 8], acc[i][1]);
      }
    }
  finish(t, sum);
}

__attribute__((target("avx512f,avx512bw,avx512vnni"))) static ALWAYS_INLINE void store_tile(const Tile *t, int half,
                                                                                          const __m512i *acc) {
  int64_t columns = t->columns - 16 * half;
  __mmask16 mask = (__mmask16)(columns < 16 ? (1u << columns) - 1 : ~0u);
  __m512 scale = _mm512_maskz_loadu_ps(mask, t->scale + 16 * half), add = _mm512_maskz_loadu_ps(mask, t->add + 16 * half);
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
    if (r < t->rows) {
      __m512 v = _mm512_mul_ps(_mm512_cvtepi32_ps(acc[r]), _mm512_mul_ps(_mm512_set1_ps(t->back[r]), scale));
      _mm512_mask_storeu_ps(t->out + r * t->stride + 16 * half, mask, _mm512_add_ps(v, add));
    }
}

/* sum += the products of pairs. In assembly: compilers copy `sum` around the intrinsic. */
__attribute__((target("avx512f,avx512vnni"))) static ALWAYS_INLINE void add_pairs(__m512i *sum, __m512i a, __m512i b) {
  __asm__("vpdpwssd %2, %1, %0" : "+v"(*sum) : "v"(a), "v"(b));
}

__attribute__((target("avx512f,avx512bw,avx512vnni"))) static void product_avx512(const Tile *t) {
  const int16_t *a = t->a, *b = t->b;
  const __m512i zero = _mm512_setzero_si512();
  __m512i low[ROWS] = {zero, zero, zero, zero, zero, zero, zero, zero};
  __m512i high[ROWS] = {zero, zero, zero, zero, zero, zero, zero, zero};
  int64_t k = t->k;
  if (t->columns > 16) {
    for (int64_t p = 0; p < k; p += 2, b += 2 * COLS) {
      __m512i b0 = _mm512_loadu_si512(b), b1 = _mm512_loadu_si512(b + 32);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        __m512i v = _mm512_set1_epi32(pair_at(a + r * k + p));
        add_pairs(low + r, v, b0);
        add_pairs(high + r, v, b1);
      }
    }
    store_tile(t, 1, high);
  } else {
    for (int64_t p = 0; p < k; p += 2, b += 2 * COLS) {
      __m512i b0 = _mm512_loadu_si512(b);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) add_pairs(low + r, _mm512_set1_epi32(pair_at(a + r * k + p)), b0);
    }
  }
  store_tile(t, 0, low);
}
#endif

static int to_fixed(const float *x, int64_t stride, int64_t rows, int64_t k, const double *weight, double *estimate,
                    int16_t *out, float *back) {
#if CG_X86
  if (isa == 2) return to_fixed_avx512(x, stride, rows, k, weight, estimate, out, back);
  if (isa == 1) return to_fixed_avx2(x, stride, rows, k, weight, estimate, out, back);
#endif
  return to_fixed_portable(x, stride, rows, k, weight, estimate, out, back);
}

/* out[rows][n] = fixed[rows][k] * m + add[n], of rows from to_fixed, at most BLOCK; behind them, up to a multiple of ROWS,
 * `fixed` may hold anything. */
static void product(const int16_t *fixed, const float *back, int64_t rows, const Fixed *m, const float *add, float *out,
                    int64_t stride) {
  int64_t even = m->k + (m->k & 1);
  for (int64_t j = 0; j < m->n; j += COLS)
    for (int64_t i = 0; i < rows; i += ROWS) {
      Tile tile = {fixed + i * even, m->pairs + j * even, even, rows - i < ROWS ? rows - i : ROWS,
                   m->n - j < COLS ? m->n - j : COLS, back + i, m->scale + j, add + j, out + i * stride + j, stride};
#if CG_X86
      if (isa == 2) {
        product_avx512(&tile);
        continue;
      }
      if (isa == 1) {
        product_avx2(&tile);
        continue;
      }
#endif
      product_portable(&tile);
    }
}

/* out[i] = in[i] - mean[i], from fp16. */
static void widen_portable(const uint16_t *in, const float *mean, int64_t width, float *out) {
  for (int64_t i = 0; i < width; i++) {
    uint32_t sign = (uint32_t)(in[i] & 0x8000) << 16, mag = in[i] & 0x7fff, bits = (mag << 13) + 0x38000000;
    float value;
    if (mag >= 0x7c00) bits = 0x7f800000 | (mag & 0x3ff) << 13; /* infinity, NaN */
    memcpy(&value, &bits, 4);
    if (mag < 0x400) value = (float)mag / 16777216.0f; /* subnormal */
    memcpy(&bits, &value, 4);
    bits |= sign;
    memcpy(&value, &bits, 4);
    out[i] = value - mean[i];
  }
}

#if CG_X86
__attribute__((target("avx2,f16c"))) static void widen_avx2(const uint16_t *in, const float *mean, int64_t width,
                                                            float *out) {
  int64_t i = 0;
  for (; i + 8 <= width; i += 8) {
    __m256 x = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(in + i)));
    _mm256_storeu_ps(out + i, _mm256_sub_ps(x, _mm256_loadu_ps(mean + i)));
  }
  widen_portable(in + i, mean + i, width - i, out + i);
}
#endif

static void widen(const uint16_t *in, const float *mean, int64_t width, float *out) {
#if CG_X86
  if (isa >= 1) {
    widen_avx2(in, mean, width, out);
    return;
  }
#endif
  widen_portable(in, mean, width, out);
}

/* A cell's rows and forward transform: its joint part [channels][joint] and its own [channels][n_own], as Fixed has them. */
typedef struct {
  const char *rows;     /* fp16 if `half`, else float32; `stride` bytes a token */
  int64_t stride, half;
  const float *mean;    /* [channels] */
  const double *weight; /* [channels]: of the estimate */
  const int16_t *top;
  const float *top_scale;
  const int16_t *own;
  const float *own_scale;
  int64_t channels, n_own;
} ForwardCell;

/* Components [rows][coefficients] of a block: `active` joint ones, each cell's own, 0; and to the estimates [rows] is added
 * what the cells' channels say. CG_CORRUPT: a row has NaN, infinity or a huge value. */
API int cg_components(const ForwardCell *cells, int64_t n_cells, int64_t rows, int64_t joint,
                      const int16_t *joint_pairs, const float *joint_scale, int64_t active, float *out,
                      int64_t coefficients, double *estimate) {
  Fixed all = {joint_pairs, joint_scale, n_cells * joint, active};
  int64_t widest = 0;
  for (int64_t i = 0; i < n_cells; i++)
    if (cells[i].channels > widest) widest = cells[i].channels;
  float back[BLOCK], *x = malloc((size_t)(BLOCK * widest + 1) * sizeof *x);
  int16_t *fixed = calloc((size_t)(BLOCK * ((widest > all.k ? widest : all.k) + 1)), sizeof *fixed);
  float *top = malloc((size_t)(BLOCK * all.k + 1) * sizeof *top), *zeros = calloc((size_t)coefficients, sizeof *zeros);
  int result = x && fixed && top && zeros ? CG_OK : CG_MEMORY;
  for (int64_t first = 0; first < rows && !result; first += BLOCK) {
    int64_t n = rows - first < BLOCK ? rows - first : BLOCK;
    float *y = out + first * coefficients, *to = y + active;
    for (int64_t i = 0; i < n_cells && !result; to += cells[i++].n_own) {
      const ForwardCell *c = cells + i;
      Fixed t = {c->top, c->top_scale, c->channels, joint}, own = {c->own, c->own_scale, c->channels, c->n_own};
      for (int64_t r = 0; r < n; r++) {
        const char *from = c->rows + (first + r) * c->stride;
        float *centred = x + r * c->channels;
        if (c->half)
          widen((const uint16_t *)from, c->mean, c->channels, centred);
        else
          for (int64_t j = 0; j < c->channels; j++) centred[j] = ((const float *)from)[j] - c->mean[j];
      }
      result = to_fixed(x, c->channels, n, c->channels, c->weight, estimate + first, fixed, back);
      if (result) break;
      product(fixed, back, n, &t, zeros, top + i * joint, all.k);
      product(fixed, back, n, &own, zeros, to, coefficients);
    }
    if (!result) result = to_fixed(top, all.k, n, all.k, NULL, NULL, fixed, back);
    if (!result) product(fixed, back, n, &all, zeros, y, coefficients);
    for (int64_t r = 0; r < n; r++) y[(r + 1) * coefficients - 1] = 0;
  }
  free(x);
  free(fixed);
  free(top);
  free(zeros);
  return result;
}

/* ---- from components to symbols ---- */

typedef struct {
  const float *zero, *rounding; /* per component: the size, in steps, from which a value is not 0; what rounds it */
  const int32_t *reach;         /* the largest magnitude with a symbol */
  int64_t width;                /* components */
  float per_step, limit;
} Quantizer;

/* Values of one row of components from `first` on. Returns 1 if any escapes, CG_CORRUPT for a size above the limit or
 * NaN. Two products, never fused: they round as numpy's. */
static int quantize_portable(const float *components, float gain, const Quantizer *q, int64_t first, int32_t *value,
                             int8_t *symbol) {
  int wide = 0;
  for (int64_t i = first; i < q->width; i++) {
    float scaled = components[i] * gain, size = scaled * q->per_step, m = size < 0 ? -size : size;
    if (!(m <= q->limit)) return CG_CORRUPT;
    int32_t v = (int32_t)(m + q->rounding[i]);
    v = m >= q->zero[i] ? (v < 1 ? 1 : v) : 0;
    int escapes = v > q->reach[i];
    wide |= escapes;
    value[i] = size < 0 ? -v : v;
    symbol[i] = escapes ? ESCAPE : (int8_t)value[i];
  }
  return wide;
}

#if CG_X86
__attribute__((target("avx512f,avx512bw"))) static int quantize_avx512(const float *components, float gain,
                                                                       const Quantizer *q, int32_t *value,
                                                                       int8_t *symbol) {
  const __m512 most = _mm512_set1_ps(q->limit);
  __mmask16 wide = 0, bad = 0;
  int64_t i = 0;
  for (; i + 16 <= q->width; i += 16) {
    __m512 size = _mm512_mul_ps(_mm512_loadu_ps(components + i), _mm512_set1_ps(gain));
    size = _mm512_mul_ps(size, _mm512_set1_ps(q->per_step));
    __m512 m = _mm512_abs_ps(size);
    bad |= _mm512_cmp_ps_mask(m, most, _CMP_NLE_UQ);
    __mmask16 there = _mm512_cmp_ps_mask(m, _mm512_loadu_ps(q->zero + i), _CMP_GE_OQ);
    __m512i v = _mm512_cvttps_epi32(_mm512_add_ps(m, _mm512_loadu_ps(q->rounding + i)));
    v = _mm512_maskz_max_epi32(there, v, _mm512_set1_epi32(1));
    __mmask16 escapes = _mm512_cmpgt_epi32_mask(v, _mm512_loadu_si512(q->reach + i));
    __mmask16 negative = _mm512_cmp_ps_mask(size, _mm512_setzero_ps(), _CMP_LT_OQ);
    v = _mm512_mask_sub_epi32(v, negative, _mm512_setzero_si512(), v);
    wide |= escapes;
    _mm512_storeu_si512(value + i, v);
    _mm_storeu_si128((__m128i *)(symbol + i),
                     _mm512_cvtepi32_epi8(_mm512_mask_mov_epi32(v, escapes, _mm512_set1_epi32(ESCAPE))));
  }
  int rest = quantize_portable(components, gain, q, i, value, symbol);
  return bad || rest < 0 ? CG_CORRUPT : wide || rest;
}
#endif

/* Eight at a time: stored one by one, bytes would wait for one another. columns % 32 == 0. */
NOINLINE static void permute(const int8_t *from, const int32_t *order, int64_t columns, int8_t *out) {
  for (int64_t c = 0; c < columns; c += 8) {
    uint8_t eight[8];
    for (int i = 0; i < 8; i++) eight[i] = (uint8_t)from[order[c + i]];
    memcpy(out + c, eight, 8);
  }
}

/* Quantize components [rows][width], a row's multiplied by gain[row]: symbols [rows][columns], column c that of
 * component order[c]. threshold [2][columns]: the size, in steps, from which a value is not 0, and what is added before
 * it is rounded down. What exceeds reach[c] escapes: its index goes to escape_at, its value to escape_value (room for
 * `room` of them). Returns the number of escapes; CG_CORRUPT for a size above the limit or NaN, CG_MEMORY if there is no
 * room. */
API int64_t cg_quantize(const float *components, int64_t rows, int64_t width, const float *gain, const int32_t *order,
                        int64_t columns, float per_step, float limit, const float *threshold, const int32_t *reach,
                        int8_t *symbols, int64_t *escape_at, int32_t *escape_value, int64_t room) {
  float *zero = calloc((size_t)width + 1, 4), *rounding = calloc((size_t)width + 1, 4);
  int32_t *most = calloc((size_t)width + 1, 4), *value = malloc((size_t)(width + 1) * 4);
  int8_t *symbol = malloc((size_t)width + 1);
  int64_t escapes = zero && rounding && most && value && symbol ? 0 : CG_MEMORY;
  for (int64_t c = 0; c < columns && !escapes; c++) {
    zero[order[c]] = threshold[c];
    rounding[order[c]] = threshold[columns + c];
    most[order[c]] = reach[c];
  }
  Quantizer q = {zero, rounding, most, width, per_step, limit};
  for (int64_t r = 0; r < rows && escapes >= 0; r++) {
    int8_t *out = symbols + r * columns;
    int wide;
#if CG_X86
    if (isa == 2)
      wide = quantize_avx512(components + r * width, gain[r], &q, value, symbol);
    else
#endif
      wide = quantize_portable(components + r * width, gain[r], &q, 0, value, symbol);
    if (wide < 0) escapes = wide;
    permute(symbol, order, columns, out);
    for (int64_t c = 0; c < columns && wide > 0 && escapes >= 0; c++)
      if (out[c] == ESCAPE) {
        if (escapes == room) {
          escapes = CG_MEMORY;
        } else {
          escape_at[escapes] = r * columns + c;
          escape_value[escapes++] = value[order[c]];
        }
      }
  }
  free(zero);
  free(rounding);
  free(most);
  free(value);
  free(symbol);
  return escapes;
}

/* ---- from symbols to rows ---- */

/* Most symbols are 0: a token's others are listed, and each adds a multiple of a basis row. Bases are int8 (as the
 * profile stores them; their units are in the values) and tiled, [width / TILE][rows][TILE], so that a tile stays in the
 * first-level cache while a block's tokens pass. What is dense, a cell's joint part, is a product in fixed point. */
#define TILE 64 /* columns of a basis that are summed at a time */

/* What a column of symbols stands for: row `row` of the basis of part `part` (0: the joint one, i + 1: cell i's tail, the
 * number of cells + 1: nothing), and how symbols become values: sign(s) * (|s| - shrink[|s| > 1]) * scale. */
typedef struct {
  float scale, shrink[2];
  int32_t part, row;
} Column;

typedef struct {
  int32_t at;  /* TILE * row of the basis */
  float value; /* what the row is multiplied with */
} Term;

/* out[TILE] = init + the sum of a token's terms in one tile. */
static void add_terms_portable(const Term *term, int64_t n, const int8_t *tile, const float *init, float *out) {
  float sum[TILE];
  memcpy(sum, init, sizeof sum);
  for (int64_t i = 0; i < n; i++) {
    const int8_t *row = tile + term[i].at;
    for (int j = 0; j < TILE; j++) sum[j] += term[i].value * (float)row[j];
  }
  memcpy(out, sum, sizeof sum);
}

#if CG_X86
__attribute__((target("avx2,fma"))) static void add_terms_avx2(const Term *term, int64_t n, const int8_t *tile,
                                                               const float *init, float *out) {
  __m256 sum[TILE / 8];
  for (int j = 0; j < TILE / 8; j++) sum[j] = _mm256_loadu_ps(init + 8 * j);
  for (int64_t i = 0; i < n; i++) {
    const int8_t *row = tile + term[i].at;
    __m256 v = _mm256_set1_ps(term[i].value);
    for (int j = 0; j < TILE / 8; j++) {
      __m256i b = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(row + 8 * j)));
      sum[j] = _mm256_fmadd_ps(v, _mm256_cvtepi32_ps(b), sum[j]);
    }
  }
  for (int j = 0; j < TILE / 8; j++) _mm256_storeu_ps(out + 8 * j, sum[j]);
}

/* Two terms in fixed point: sums of int16 times int8 in 32 bits are exact, and take half of float32's instructions. */
typedef struct {
  int32_t at[2];
  int16_t value[2];
  float unit; /* of the values of this list */
} Pair;

/* A list of terms in pairs. Values are scaled so that neither they nor their sums overflow. */
__attribute__((target("avx512f,avx512bw,avx512vl"))) static void pair_terms(const Term *term, int64_t n, Pair *pair) {
  float most = 0, all = 0;
  for (int64_t i = 0; i < n; i++) {
    float size = fabsf(term[i].value);
    most = size > most ? size : most;
    all += size;
  }
  float unit = most / 32767.0f, other = all * (128.0f / 2.1e9f);
  unit = other > unit ? other : unit;
  float per_unit = unit > 0 ? 1 / unit : 0;
  for (int64_t i = 0; i < n; i += 2) {
    const Term *second = term + (i + 1 < n ? i + 1 : i);
    int32_t low = _mm_cvtss_si32(_mm_set_ss(term[i].value * per_unit));
    int32_t high = i + 1 < n ? _mm_cvtss_si32(_mm_set_ss(second->value * per_unit)) : 0;
    pair[i / 2] = (Pair){{term[i].at, second->at}, {(int16_t)low, (int16_t)high}, unit};
  }
}

__attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni"))) static void add_pairs_avx512(
    const Pair *pair, int64_t n, const int8_t *tile, const float *init, float *out) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  const __m512i zero = _mm512_setzero_si512();
  __m512i low0 = zero, high0 = zero, low1 = zero, high1 = zero; /* columns 8 i to 8 i + 3, and 8 i + 4 to 8 i + 7 */
  for (int64_t i = 0; i < n; i++) {
    const int8_t *a = tile + pair[i].at[0], *b = tile + pair[i].at[1];
    __m512i v = _mm512_set1_epi32(pair_at(pair[i].value));
    __m512i a0 = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)a));
    __m512i b0 = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)b));
    __m512i a1 = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(a + 32)));
    __m512i b1 = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(b + 32)));
    add_pairs(&low0, v, _mm512_unpacklo_epi16(a0, b0));
    add_pairs(&high0, v, _mm512_unpackhi_epi16(a0, b0));
    add_pairs(&low1, v, _mm512_unpacklo_epi16(a1, b1));
    add_pairs(&high1, v, _mm512_unpackhi_epi16(a1, b1));
  }
  __m512 unit = _mm512_set1_ps(n ? pair->unit : 0);
  const __m512i sums[4] = {
      _mm512_permutex2var_epi32(low0, first, high0), _mm512_permutex2var_epi32(low0, second, high0),
      _mm512_permutex2var_epi32(low1, first, high1), _mm512_permutex2var_epi32(low1, second, high1)};
  for (int j = 0; j < 4; j++)
    _mm512_storeu_ps(out + 16 * j, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[j]), unit, _mm512_loadu_ps(init + 16 * j)));
}
#endif

/* The terms of the tokens of a block, in lists: one for the joint part and one for each cell, of every token. */
typedef struct {
  int64_t parts;       /* lists a token, the last one for padding columns */
  int32_t *base, *end; /* [parts]: where a part's list begins, [BLOCK][parts]: and ends, in a token's terms */
  int64_t room;        /* terms of a token */
  Term *term;          /* [BLOCK][room] */
#if CG_X86
  Pair *pair; /* the same in pairs, for AVX-512; a list has one more than half as many */
#endif
} Terms;

#if CG_X86
static inline Pair *pairs_of(const Terms *terms, int64_t token, int64_t part) {
  return terms->pair + token * (terms->room / 2 + terms->parts) + terms->base[part] / 2 + part;
}
#endif

static inline void add_terms(const Terms *terms, int64_t token, int64_t part, const int8_t *tile, const float *init,
                             float *out) {
  const Term *term = terms->term + token * terms->room + terms->base[part];
  int64_t n = terms->end[token * terms->parts + part] - terms->base[part];
#if CG_X86
  if (isa == 2) {
    add_pairs_avx512(pairs_of(terms, token, part), (n + 1) / 2, tile, init, out);
    return;
  }
  if (isa == 1) {
    add_terms_avx2(term, n, tile, init, out);
    return;
  }
#endif
  add_terms_portable(term, n, tile, init, out);
}

/* Round to nearest even, as the hardware does; the caller has clamped to the finite range. */
static uint16_t half_bits(float value) {
  uint32_t b;
  memcpy(&b, &value, 4);
  uint32_t sign = b >> 16 & 0x8000, mag = b & 0x7fffffff;
  if (mag < 0x38800000) { /* below 2^-14: subnormal halves, units of 2^-24 */
    float m;
    memcpy(&m, &mag, 4);
    return (uint16_t)(sign | (uint32_t)lrintf(m * 16777216.0f));
  }
  mag += 0xfff + (mag >> 13 & 1);
  return (uint16_t)(sign | ((mag - 0x38000000) >> 13));
}

static void store_half_portable(const float *v, int64_t n, uint16_t *out) {
  for (int64_t i = 0; i < n; i++) {
    float x = v[i] > 65504.0f ? 65504.0f : v[i] < -65504.0f ? -65504.0f : v[i];
    out[i] = half_bits(x);
  }
}

#if CG_X86
__attribute__((target("avx2,f16c"))) static void store_half_avx2(const float *v, int64_t n, uint16_t *out) {
  const __m256 top = _mm256_set1_ps(65504.0f), bottom = _mm256_set1_ps(-65504.0f);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    __m256 x = _mm256_max_ps(_mm256_min_ps(_mm256_loadu_ps(v + i), top), bottom);
    _mm_storeu_si128((__m128i *)(out + i), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  store_half_portable(v + i, n - i, out + i);
}
#endif

static void store_half(const float *v, int64_t n, uint16_t *out) {
#if CG_X86
  if (isa >= 1) {
    store_half_avx2(v, n, out);
    return;
  }
#endif
  store_half_portable(v, n, out);
}

/* Rotate a head's leading channels, `2 * pairs` of them in interleaved pairs: v[i] * turn[i] + v[i ^ 1] * cross[i]. */
static void rotate_portable(const float *v, const float *turn, const float *cross, int64_t channels, float *out) {
  for (int64_t i = 0; i < channels; i += 2) {
    out[i] = v[i] * turn[i] + v[i + 1] * cross[i];
    out[i + 1] = v[i + 1] * turn[i + 1] + v[i] * cross[i + 1];
  }
}

#if CG_X86
__attribute__((target("avx2,fma"))) static void rotate_avx2(const float *v, const float *turn, const float *cross,
                                                            int64_t channels, float *out) {
  int64_t i = 0;
  for (; i + 8 <= channels; i += 8) {
    __m256 x = _mm256_loadu_ps(v + i);
    __m256 other = _mm256_mul_ps(_mm256_permute_ps(x, 0xb1), _mm256_loadu_ps(cross + i));
    _mm256_storeu_ps(out + i, _mm256_fmadd_ps(x, _mm256_loadu_ps(turn + i), other));
  }
  rotate_portable(v + i, turn + i, cross + i, channels - i, out + i);
}
#endif

static void rotate(const float *v, const float *turn, const float *cross, int64_t channels, float *out) {
#if CG_X86
  if (isa >= 1) {
    rotate_avx2(v, turn, cross, channels, out);
    return;
  }
#endif
  rotate_portable(v, turn, cross, channels, out);
}

/* One cell of a block: the channels of some heads of one layer, keys or values. */
typedef struct {
  const int16_t *head; /* basis rows of the joint part, as Fixed has them, and their */
  const float *scale;  /* units, [width] */
  const int8_t *tail; /* [tiles][own][TILE]: basis rows of the cell's own components */
  const float *mean;  /* [width] */
  char *rows;         /* where token 0's first head goes */
  int64_t token_stride, head_stride; /* bytes; channels are contiguous */
  int64_t own;        /* components of the cell's own that this level codes */
  int64_t heads, dim, width; /* width: heads * dim rounded up to TILE */
  int64_t rotary;     /* channels of a head to rotate, 0 for values */
} Cell;

/* A bit for every of 32 symbols that is not 0. */
static inline uint32_t nonzero(const int8_t *symbols) {
#if CG_X86
  const __m128i zero = _mm_setzero_si128();
  __m128i low = _mm_cmpeq_epi8(_mm_loadu_si128((const __m128i *)symbols), zero);
  __m128i high = _mm_cmpeq_epi8(_mm_loadu_si128((const __m128i *)(symbols + 16)), zero);
  return ~((uint32_t)_mm_movemask_epi8(low) | (uint32_t)_mm_movemask_epi8(high) << 16);
#else
  uint32_t bits = 0;
  for (int i = 0; i < 32; i++) bits |= (uint32_t)(symbols[i] != 0) << i;
  return bits;
#endif
}

/* Lists the terms of a token, part by part. A part's list has room for all its components; next[part] is where it begins,
 * and afterwards ends. Returns the number of escapes that were used up. */
NOINLINE static int64_t list_terms(const int8_t *symbols, const Column *column, int64_t columns, int64_t first,
                                   const int64_t *escape_at, const int32_t *escape_value, int64_t escapes, float gain,
                                   Term *term, int32_t *next) {
  int64_t e = 0;
  for (int64_t group = 0; group < columns; group += GROUP)
    for (uint32_t bits = nonzero(symbols + group); bits; bits &= bits - 1) {
      int64_t c = group + __builtin_ctz(bits);
      const Column *to = column + c;
      int v = symbols[c], sign = v >> 31, m = (v ^ sign) - sign; /* signs are random: no branch on them */
      float size = (float)m - to->shrink[m > 1];
      size *= (float)(2 * sign + 1);
      if (v == ESCAPE && e < escapes && escape_at[e] == first + c) size = (float)escape_value[e++];
      term[next[to->part]++] = (Term){TILE * to->row, size * to->scale * gain};
    }
  return e;
}

/* Symbols of one block to rows of the engine's cache.
 *
 * symbols [rows][columns]; escapes: indices into symbols (increasing), and values; a token's values are multiplied by
 * gain[token]. joint_basis [tiles][active][TILE], joint_width = cells * joint rounded up to TILE. cosine, sine
 * [rows][rotary / 2]. halves: rotary pairs are (i, i + rotary / 2) in the output. half_out: rows are fp16, else float32.
 */
API int cg_reconstruct(const int8_t *symbols, int64_t rows, const Column *column, int64_t columns,
                       const int64_t *escape_at, const int32_t *escape_value, int64_t escapes, const float *gain,
                       const int8_t *joint_basis, int64_t active, int64_t joint, int64_t joint_width, const Cell *cells,
                       int64_t n_cells, const float *cosine, const float *sine, int halves, int half_out) {
  int64_t widest = 0, longest = 0, pairs = 0, parts = n_cells + 2;
  for (int64_t i = 0; i < n_cells; i++) {
    if (cells[i].width > widest) widest = cells[i].width;
    if (cells[i].dim > longest) longest = cells[i].dim;
    if (cells[i].rotary > 2 * pairs) pairs = cells[i].rotary / 2;
  }
  Terms terms = {.parts = parts, .room = columns}; /* a column has one place: columns are enough */
  terms.base = calloc((size_t)parts, sizeof *terms.base);
  terms.end = malloc((size_t)(BLOCK * parts) * sizeof *terms.end);
  terms.term = malloc((size_t)(BLOCK * columns + 1) * sizeof *terms.term);
  int ready = terms.base && terms.end && terms.term;
#if CG_X86
  terms.pair = isa == 2 ? malloc((size_t)(BLOCK * (columns / 2 + parts)) * sizeof *terms.pair) : NULL;
  ready = ready && (isa != 2 || terms.pair);
#endif
  float *zeros = calloc(TILE, 4), back[BLOCK];
  int16_t *fixed = calloc((size_t)(BLOCK * (joint + 1)) + 1, sizeof *fixed);
  float *y = calloc((size_t)(BLOCK * joint_width) + 1, 4);
  float *x = calloc((size_t)(BLOCK * widest) + 1, 4);
  float *turn = malloc((size_t)(2 * BLOCK * pairs) * 4 + 4), *cross = malloc((size_t)(2 * BLOCK * pairs) * 4 + 4);
  float *turned = malloc((size_t)longest * 4 + 4), *split = malloc((size_t)longest * 4 + 4);
  int result = ready && zeros && fixed && y && x && turn && cross && turned && split ? CG_OK : CG_MEMORY;
  if (result == CG_OK) {
    terms.base[1] = (int32_t)active;
    for (int64_t i = 0; i < n_cells; i++) terms.base[i + 2] = terms.base[i + 1] + (int32_t)cells[i].own;
  }
  int64_t e = 0;
  for (int64_t first = 0; result == CG_OK && first < rows; first += BLOCK) {
    int64_t n = rows - first < BLOCK ? rows - first : BLOCK;
    for (int64_t t = 0; t < n; t++) {
      int32_t *end = memcpy(terms.end + t * parts, terms.base, (size_t)parts * sizeof *end);
      e += list_terms(symbols + (first + t) * columns, column, columns, (first + t) * columns, escape_at + e,
                      escape_value + e, escapes - e, gain[first + t], terms.term + t * columns, end);
#if CG_X86
      for (int64_t i = 0; isa == 2 && i <= n_cells; i++)
        pair_terms(terms.term + t * columns + terms.base[i], end[i] - terms.base[i], pairs_of(&terms, t, i));
#endif
    }
    for (int64_t i = 0; i < n * pairs; i++) {
      turn[2 * i] = turn[2 * i + 1] = cosine[first * pairs + i];
      cross[2 * i] = -sine[first * pairs + i];
      cross[2 * i + 1] = sine[first * pairs + i];
    }
    for (int64_t j = 0; j < joint_width; j += TILE)
      for (int64_t t = 0; t < n; t++)
        add_terms(&terms, t, 0, joint_basis + j * active, zeros, y + t * joint_width + j);
    for (int64_t i = 0; i < n_cells; i++) {
      const Cell *cell = cells + i;
      Fixed head = {cell->head, cell->scale, joint, cell->width};
      result = to_fixed(y + i * joint, joint_width, n, joint, NULL, NULL, fixed, back);
      if (result) break;
      product(fixed, back, n, &head, cell->mean, x, cell->width);
      for (int64_t j = 0; cell->own && j < cell->width; j += TILE)
        for (int64_t t = 0; t < n; t++)
          add_terms(&terms, t, i + 1, cell->tail + j * cell->own, x + t * cell->width + j, x + t * cell->width + j);
      for (int64_t t = 0; t < n; t++)
        for (int64_t h = 0; h < cell->heads; h++) {
          const float *v = x + t * cell->width + h * cell->dim;
          char *to = cell->rows + (first + t) * cell->token_stride + h * cell->head_stride;
          if (cell->rotary) {
            float *out = turned;
            rotate(v, turn + 2 * t * pairs, cross + 2 * t * pairs, 2 * pairs, out);
            if (halves) {
              for (int64_t k = 0; k < pairs; k++) split[k] = turned[2 * k], split[pairs + k] = turned[2 * k + 1];
              out = split;
            }
            memcpy(out + 2 * pairs, v + 2 * pairs, (size_t)(cell->dim - 2 * pairs) * 4);
            v = out;
          }
          if (half_out)
            store_half(v, cell->dim, (uint16_t *)to);
          else
            memcpy(to, v, (size_t)cell->dim * 4);
        }
    }
  }
  free(terms.base);
  free(terms.end);
  free(terms.term);
#if CG_X86
  free(terms.pair);
#endif
  free(zeros);
  free(fixed);
  free(y);
  free(x);
  free(turn);
  free(cross);
  free(turned);
  free(split);
  return result;
}
