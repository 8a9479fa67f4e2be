"""Redistributes in compiled code: plans as arguments of operators, and one order of them on all ranks."""
