"""A backend of torch.compile: row-wise regions become kernels, and Inductor compiles the rest."""
