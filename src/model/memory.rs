//! The predicted memory of a training step: parameters, gradients, optimizer state and what autograd saves.
