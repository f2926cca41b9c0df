"""`python -m hf_axonn.launch`: what `axonn-launch` does."""

from hf_axonn.launch.command import main


if __name__ == "__main__":
    main()
