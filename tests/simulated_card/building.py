"""Compiles what torch's C++ core needs to believe in the card; once for each installed torch and version of this."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch
from torch.utils import cpp_extension

SOURCE = Path(__file__).with_name("registration.cpp")


class CannotBuild(Exception):
    """Why there is no simulated card here."""


def library() -> Path:
    """Return the compiled library, which a process has to load before it imports torch.

    Raises:
        CannotBuild: no compiler, or a torch for real cards, which has all of this itself.
    """
    if torch.version.cuda is not None or torch.version.hip is not None:
        raise CannotBuild("this torch is built for real cards")
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise CannotBuild("no C++ compiler (c++, or what CXX names)")
    folder = Path(cpp_extension.TORCH_LIB_PATH)
    # It is linked against the torch of this environment, by its path: another environment's is another library.
    digest = hashlib.sha256(f"{torch.__version__} {folder}".encode() + SOURCE.read_bytes()).hexdigest()[:16]
    target = Path(cpp_extension.get_default_build_root()) / "cmexam_tune_tests" / f"card_{digest}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_suffix(f".{os.getpid()}")
    command = [
        compiler, "-std=c++20", "-O0", "-shared", "-fPIC",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{path}" for path in cpp_extension.include_paths()), str(SOURCE), f"-L{folder}", f"-Wl,-rpath,{folder}",
        "-Wl,--no-as-needed", "-lc10", "-ltorch_cpu", "-o", str(staged),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBuild(f"{compiler} cannot compile torch's headers: {done.stderr.strip().splitlines()[0]}")
    staged.rename(target)
    return target
