"""Models. A model is a torch.nn.Module class, or a function returning one; its config is one file under conf/model/.

It maps a batch (N, *data.input_shape) to logits (N, data.num_classes). Annotate every argument (types in the
config are checked against the annotations) and raise ValueError for values that cannot work.
"""
