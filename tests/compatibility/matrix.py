"""All rows, in the order of the page."""

from tests.compatibility import ddp, fsdp, tensor_parallel

ROWS = [*ddp.ROWS, *fsdp.ROWS, *tensor_parallel.ROWS]
TABLES = list(dict.fromkeys(row.table for row in ROWS))
