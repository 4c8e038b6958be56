"""An environment with the oldest supported transformers, and everything else from the environment that runs this.

    python scripts/oldest_environment.py .venv-oldest

Made without a second copy of torch: a `.pth` file lends it the packages of this environment, and what it installs
itself (transformers, and what that version pins otherwise) comes first.
"""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from fc_eval.models.versions import OLDEST


def main(folder: Path) -> None:
    """Makes the environment anew.

    Args:
        folder: where.

    Raises:
        CalledProcessError: pip cannot install it, and has said why.
    """
    venv.create(folder, clear=True, with_pip=False)
    python = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    own = subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True)
    lent = sysconfig.get_path("purelib")
    (Path(own.strip()) / "lent.pth").write_text(f"import site; site.addsitedir({lent!r})\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    subprocess.check_call([*pip, f"transformers=={'.'.join(map(str, OLDEST))}.*"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
