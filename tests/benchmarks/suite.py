"""All benchmarks, in the order of the page."""

from collections.abc import Sequence

from tests.benchmarks.calls import Calls
from tests.benchmarks.frame import Benchmark
from tests.benchmarks.io import Io
from tests.benchmarks.scale import Scale
from tests.benchmarks.start import Start

BENCHMARKS: Sequence[Benchmark] = (Io(), Calls(), Scale(), Start())
