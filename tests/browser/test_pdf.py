"""A writeup on paper: A4, its figures and their words on it. Needs the extra `pdf` and Debian's poppler-utils."""

import shutil
import subprocess
from pathlib import Path

import pytest

from lab.cli import main

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_pdf_has_its_figures_on_a4(tmp_path: Path) -> None:
    for tool in ("pdftotext", "pdfinfo"):
        if shutil.which(tool) is None:
            pytest.fail(f"no {tool} here: apt-get install poppler-utils", pytrace=False)
    out = tmp_path / "p5-kernel.pdf"
    assert main.main(["write", "p5-kernel", "--out", str(out)]) == 0
    said = subprocess.run(["pdfinfo", out], capture_output=True, text=True, check=True).stdout
    assert "A4" in said
    text = subprocess.run(["pdftotext", "-layout", out, "-"], capture_output=True, text=True, check=True).stdout
    for words in ("time over the control's", "arithmetic intensity", "scan_kernel", "Run it again", "580.159.04"):
        assert words in text, words
