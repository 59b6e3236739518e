"""One target under atheris, in this process: ``python -m tests.fuzz.libfuzzer TARGET ...``.

What comes after the target is libFuzzer's own: options such as ``-runs=1000``, and corpora.
"""

import sys

import atheris


def main() -> None:
    with atheris.instrument_imports(include=["discod"]):
        from tests.fuzz.targets import TARGETS
    target = TARGETS[sys.argv.pop(1)]
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
