"""The codec: KV to bitstream and back. Reading order: profile, transform, quantize, entropy, codec, calibrate."""

from cachegen_rag.codec.codec import Codec
from cachegen_rag.codec.profile import Level, Profile, shipped_profile

__all__ = ["Codec", "Level", "Profile", "shipped_profile"]
