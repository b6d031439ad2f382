/* Products in fixed point: rows of float32 times a matrix of int16, as kernels/reference.py defines it. A row is scaled
 * by a power of two to a Euclidean norm of at most NORM and rounded to int16, the columns of the matrix are so too; by
 * the Cauchy-Schwarz inequality a product then fits 32 bits, whatever the order of its sum. Results are the same on every
 * machine. */
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
    if (even > k) out[k] = 0;
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
    if (even > k) out[k] = 0;
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
