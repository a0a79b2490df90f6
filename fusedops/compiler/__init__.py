"""Your own operators: functions of plain PyTorch operators, as one kernel each way."""
