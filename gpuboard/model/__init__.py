"""The nouns: frozen values and pure functions on them. No I/O, no clock, nothing imported from the rest of gpuboard."""
