"""Events under URLs: fsspec, which opens s3:// with obstore, as publications are."""

import importlib.util
import os
from typing import Any


def file_systems() -> Any:
    """Return fsspec; where s3fs is installed, that opens s3:// as before."""
    import fsspec

    if importlib.util.find_spec("s3fs") is None:
        import obstore.fsspec

        # An endpoint is as secure as it is named.
        if os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"):
            os.environ.setdefault("AWS_ALLOW_HTTP", "true")
        obstore.fsspec.register("s3")
    return fsspec
