"""A backend of torch.compile: the row-wise parts of any model as one kernel each way, and the rest by Inductor."""
