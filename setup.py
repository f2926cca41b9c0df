"""What setup.cfg cannot say: the long description, README.md with links that work on the page of an index."""

import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup


HERE = Path(__file__).resolve().parent
RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")


def long_description(readme: str, source: str | None, version: str) -> str:
    """README.md with its relative links made absolute.

    Args:
        readme: its text.
        source: the address of the repository, whose files of this version are linked; None: links become their text,
            and pictures are left out.
        version: of the package; the tag is v and this.
    """

    def absolute(link: re.Match[str]) -> str:
        picture, text, target = link.groups()
        if source is None:
            return "" if picture else text
        return f"{picture}[{text}]({source.rstrip('/')}/{'raw' if picture else 'blob'}/v{version}/{target})"

    return RELATIVE.sub(absolute, readme)


def main() -> None:
    """Build as setup.cfg says."""
    settings = ConfigParser()
    settings.read(HERE / "setup.cfg", encoding="utf-8")
    urls = dict(line.split(" = ") for line in settings["metadata"]["project_urls"].strip().splitlines())
    (version,) = re.findall(r'^__version__ = "(.+)"$', (HERE / "hf_axonn/__init__.py").read_text(), re.MULTILINE)
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    setup(long_description=long_description(readme, urls.get("Source"), version))


if __name__ == "__main__":
    main()
