"""Code for newer processors is reached only after the run-time choice: nothing else in the module contains it."""

import platform
import re
import subprocess

import pytest

FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
# Vector instructions of AVX and later have names that begin with v; in the baseline only two others do.
AVX = re.compile(r"^v(?!err$|erw$)[a-z0-9]+$")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="one instruction set on this processor family")
def test_avx_code_is_confined_to_its_namespaces(extension):
    listing = subprocess.Popen(
        ["objdump", "--disassemble", "--demangle", "--no-show-raw-insn", extension],
        stdout=subprocess.PIPE,
        text=True,
    )
    confined, stray, function = set(), set(), ""
    for line in listing.stdout:
        if match := FUNCTION.match(line):
            function = match.group(1)
        elif "\t" in line and AVX.match(line.split("\t")[1].split(" ")[0].strip()):
            namespaces = {isa for isa in ("avx2", "avx512") if f"{isa}::" in function}
            if namespaces:
                confined |= namespaces
            else:
                stray.add(function)
    assert listing.wait() == 0
    assert confined == {"avx2", "avx512"}
    assert not stray
