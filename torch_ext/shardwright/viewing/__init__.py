"""Views of sharded tensors that move nothing."""
