"""The gRPC transport."""

import os

# Read when grpc is first imported, which is after this. We fork only to exec; gRPC would tell stderr of each one.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
