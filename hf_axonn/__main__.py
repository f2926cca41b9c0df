"""`python -m hf_axonn`: what `hf-axonn` does."""

import sys

from hf_axonn.cli.main import main


if __name__ == "__main__":
    sys.exit(main())
