"""`python -m bench.families [--families LLaMA,T5] [--others] [--left]` prints the table."""

import sys

from .table import main

sys.exit(main())
