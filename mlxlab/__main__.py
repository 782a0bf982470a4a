"""`python -m mlxlab`."""

from mlxlab.cli import main

raise SystemExit(main())
