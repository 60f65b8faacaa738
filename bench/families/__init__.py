"""What dsi makes of every architecture that it covers: regions, what is left unfused, and how far its numbers are from eager's.

References are eager runs without a cache. Nothing is compiled to kernels: regions run as their operators' references.

Rooms: `family` (what one is), `written`, `listed`, `beyond` (the architectures) · `axes` (the ways to run one), `trial`, `decoders`,
`encoders`, `harness` (running) · `table` (the command).
"""
