"""What is computed without sampling: success, gradients and their variance, histories, the flow of probability."""
