"""``python -m gigamlp`` is ``gigamlp``."""

from __future__ import annotations

import sys

from gigamlp.cli import main

if __name__ == "__main__":
    sys.exit(main())
