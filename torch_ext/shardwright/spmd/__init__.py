"""Plain tensors with types of the spmd_types library, which say how local tensors make up a global one."""
