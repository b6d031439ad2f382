/* The codec's inner loops for CPUs: symbol decoding and encoding, and from symbols to rows of an engine's cache.
 *
 * kernels/reference.py is the definition; kernels/README.md has the maths. Plain C11 without dependencies, called
 * through ctypes. Every entry point checks its input against the bounds it is given: a hostile bitstream yields an
 * error code, never a read or write outside the buffers. Kernels are compiled for AVX-512, for AVX2 and portably,
 * and chosen when the library is loaded (cg_set_isa).
 */
#include "codec_common.h"
#include "codec_rans.h"
#include "codec_fixed.h"
#include "codec_forward.h"
#include "codec_rows.h"
