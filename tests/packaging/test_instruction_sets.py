"""Code for newer processors stays where only the run-time choice reaches it."""

import platform
import re
import subprocess

import pytest

FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
# The names of AVX and later vector instructions begin with v; of the baseline's, only verr and verw do.
AVX = re.compile(r"^v(?!er[rw]$)[a-z0-9]+$")
BFLOAT16 = re.compile(r"^v(dpbf16ps|cvtne2?ps2bf16)$")
NEWER = ("avx2", "avx512", "avx512bf16")


@pytest.mark.release
@pytest.mark.skipif(platform.machine() != "x86_64", reason="one instruction set on this processor family")
def test_avx_code_is_confined_to_its_namespaces(extension):
    command = ["objdump", "--disassemble", "--demangle", "--no-show-raw-insn", extension]
    listing = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    confined, stray, function = set(), set(), ""
    for line in listing.stdout:
        if match := FUNCTION.match(line):
            function = match.group(1)
        elif "\t" in line and AVX.match(instruction := line.split("\t")[1].split(" ")[0].strip()):
            oldest = "avx512bf16" if BFLOAT16.match(instruction) else "avx512" if "%zmm" in line else "avx2"
            namespaces = {isa for isa in NEWER[NEWER.index(oldest) :] if f"::{isa}::" in function}
            confined |= {(oldest, isa) for isa in namespaces}
            # Clones, as in "f [clone .part.0]", are called from within the object that has them alone.
            if not namespaces and "[clone" not in function:
                stray.add(function)
    assert listing.wait() == 0
    assert confined == {(NEWER[i], isa) for i in range(len(NEWER)) for isa in NEWER[i:]}
    assert not stray
