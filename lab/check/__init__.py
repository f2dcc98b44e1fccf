"""Check before any number: families found in kernels/, candidates held against their reference, ahead-of-time builds.

In: a folder of kernels/, a workload, a seed. Out: ok, incorrect, skipped or error with its reason; registers and SASS.
Door: `families.load`, `families.names`, `accuracy.check`, `accuracy.check_family`, `compile.compile_family`.
"""
