"""gRPC around the core: translate, ask the core, write what it decided, map refusals."""
