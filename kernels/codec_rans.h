/* rANS: 32 interleaved 32-bit states, 16-bit words, 12-bit frequencies, context-dependent symbol models. */

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
