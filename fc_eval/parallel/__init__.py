"""Which layers are row-parallel, which comm each of them gets, and the emulated split on one device."""
