/* From the engine's rows to symbols: the forward transform, then quantization. */

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
  float *top = malloc((size_t)(BLOCK * all.k + 1) * sizeof *top);
  float *zeros = calloc((size_t)(coefficients + joint), sizeof *zeros);
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
