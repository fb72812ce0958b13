"""From a network to an answer: predictors, held-out rows, scores, abstention, the exported student."""
