"""Trust heads outside this process: engines, servers, registries, exported graphs, and adapters to other libraries."""
