"""Operations on tensors: torch reference, C++ and Triton implementations of one signature.

Only a docstring: transformers probes a distribution of this name.
"""
