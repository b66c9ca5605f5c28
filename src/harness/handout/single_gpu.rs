//! Section 1 of the handout: profiling, mixed precision, memory and attention on one GPU.

use super::Kind::{Code, Equations, Image, Table, Written};
use super::{HandoutProblem, Part};

pub(super) const BENCHMARKING_SCRIPT: HandoutProblem = HandoutProblem {
    name: "benchmarking_script",
    title: "Timing a Transformer end to end",
    section: "1.1.3",
    points: 4.0,
    parts: &[
        Part {
            id: "a",
            points: 2.0,
            kinds: &[Code],
            question: "Write a benchmark that builds a Transformer from given hyperparameters, draws a random batch, runs \
                       a chosen number of untimed warm-up steps and then times a chosen number of steps, either the \
                       forward pass alone or forward and backward together, with a monotonic high-resolution clock and \
                       a device synchronisation after every step.",
        },
        Part {
            id: "b",
            points: 1.0,
            kinds: &[Table, Written],
            question: "Time the forward and the backward pass of every model size with 5 warm-up steps and 10 measured \
                       steps, reporting mean and standard deviation. How long does each pass take, and is the spread \
                       between steps small?",
        },
        Part {
            id: "c",
            points: 1.0,
            kinds: &[Table, Written],
            question: "Repeat the measurement with no warm-up at all. What changes, and why? Try one and two warm-up \
                       steps as well: why can the result still differ from the one after five?",
        },
    ],
};

pub(super) const NSYS_PROFILE: HandoutProblem = HandoutProblem {
    name: "nsys_profile",
    title: "Where the time goes, kernel by kernel",
    section: "1.1.4",
    points: 5.0,
    parts: &[
        Part {
            id: "a",
            points: 1.0,
            kinds: &[Written],
            question: "Profile the forward pass, the backward pass and the optimizer step of each model size at context \
                       lengths 128, 256, 512 and 1024. What is the total time of the forward pass under the profiler, and \
                       does it agree with the time that the benchmark's own clock gave?",
        },
        Part {
            id: "b",
            points: 1.0,
            kinds: &[Written],
            question: "Which GPU kernel accumulates the most time over one forward pass, and how many times does one \
                       forward pass launch it? Is the same kernel on top when forward and backward are taken together?",
        },
        Part {
            id: "c",
            points: 1.0,
            kinds: &[Written],
            question: "Matrix multiplications do most of the arithmetic. Which other kernels take a noticeable share of \
                       the forward pass?",
        },
        Part {
            id: "d",
            points: 1.0,
            kinds: &[Written],
            question: "Profile a complete training step: forward, loss, backward and AdamW. How does the share of time \
                       spent in matrix multiplications compare with inference alone, and what takes up the rest?",
        },
        Part {
            id: "e",
            points: 1.0,
            kinds: &[Written],
            question: "Inside self-attention in a forward pass, compare the time of the softmax with the time of the \
                       matrix multiplications. How does that ratio compare with the ratio of their operation counts?",
        },
    ],
};

pub(super) const MIXED_PRECISION_ACCUMULATION: HandoutProblem = HandoutProblem {
    name: "mixed_precision_accumulation",
    title: "Accumulating in low precision",
    section: "1.1.5",
    points: 1.0,
    parts: &[Part {
        id: "",
        points: 1.0,
        kinds: &[Written],
        question: "Add 0.01 to an accumulator a thousand times in four ways: everything in float32; everything in \
                   float16; a float32 accumulator with a float16 addend, left to type promotion; and the same with the \
                   addend converted to float32 by hand. Comment on how accurate each sum is, and why.",
    }],
};

pub(super) const BENCHMARKING_MIXED_PRECISION: HandoutProblem = HandoutProblem {
    name: "benchmarking_mixed_precision",
    title: "Automatic mixed precision",
    section: "1.1.5",
    points: 2.0,
    parts: &[
        Part {
            id: "a",
            points: 0.5,
            kinds: &[Written],
            question: "A toy model computes Linear (no bias), ReLU, LayerNorm over 10 features, Linear (no bias); its \
                       parameters are float32 and it trains on a GPU under float16 autocast. What are the data types of \
                       the parameters inside the autocast region, the first linear layer's output, the layer norm's \
                       output, the logits, the loss, and the gradients?",
        },
        Part {
            id: "b",
            points: 0.5,
            kinds: &[Written],
            question: "Autocast treats layer normalisation differently from the linear layers. Which parts of layer \
                       normalisation are sensitive to reduced precision? If bfloat16 takes the place of float16, does \
                       layer normalisation still need special treatment, and why?",
        },
        Part {
            id: "c",
            points: 1.0,
            kinds: &[Code, Table, Written],
            question: "Give the benchmark an option that runs the model under bfloat16 autocast. Time the forward and \
                       backward passes of each model size with and without it, and comment on how the gain develops with \
                       model size.",
        },
    ],
};

pub(super) const MEMORY_PROFILING: HandoutProblem = HandoutProblem {
    name: "memory_profiling",
    title: "Memory of the 2.7B model",
    section: "1.1.6",
    points: 4.0,
    parts: &[
        Part {
            id: "a",
            points: 1.0,
            kinds: &[Image, Written],
            question: "Record the allocator's history of the 2.7B model and draw the timeline of active memory twice: for \
                       a forward pass alone, and for a full training step. Can the stage that is running be told from \
                       the shape of the curve and its peaks?",
        },
        Part {
            id: "b",
            points: 1.0,
            kinds: &[Table],
            question: "What is the peak memory at context lengths 128, 256 and 512, for a forward pass alone and for a \
                       full training step?",
        },
        Part {
            id: "c",
            points: 1.0,
            kinds: &[Written],
            question: "What is the peak memory of the 2.7B model under mixed precision, for a forward pass and for a full \
                       training step? Does mixed precision change memory use much?",
        },
        Part {
            id: "d",
            points: 0.5,
            kinds: &[Written, Equations],
            question: "At the reference hyperparameters, how large is one activation tensor of the residual stream of the \
                       2.7B model in single precision, in units of $1024^2$ bytes? Derive it.",
        },
        Part {
            id: "e",
            points: 0.5,
            kinds: &[Written],
            question: "Look at the largest allocations in the snapshot of a forward pass, leaving the small ones out of \
                       view. How large are they, and which code do their stack traces point to?",
        },
    ],
};

pub(super) const PYTORCH_ATTENTION: HandoutProblem = HandoutProblem {
    name: "pytorch_attention",
    title: "The cost of plain attention",
    section: "1.2.1",
    points: 2.0,
    parts: &[Part {
        id: "a",
        points: 2.0,
        kinds: &[Code, Table, Written],
        question: "Benchmark attention without a head dimension at batch size 8 over every combination of embedding \
                   width 16, 32, 64, 128 and sequence length 256, 1024, 4096, 8192, 16384: the time of 100 forward \
                   passes, the memory in use before the backward pass starts, and the time of 100 backward passes, after \
                   warm-up and with a synchronisation after each pass. Report times or out-of-memory outcomes. At which \
                   size does memory run out? Account for the memory of one of the smallest cases that does not fit. How \
                   does the memory kept for the backward pass grow with sequence length, and what would remove that \
                   cost?",
    }],
};

pub(super) const TORCH_COMPILE: HandoutProblem = HandoutProblem {
    name: "torch_compile",
    title: "What a compiler gains",
    section: "1.3",
    points: 2.0,
    parts: &[
        Part {
            id: "a",
            points: 1.0,
            kinds: &[Table],
            question: "Compile the attention of the previous problem with `torch.compile` and compare its forward and \
                       backward times with the uncompiled version over the same grid.",
        },
        Part {
            id: "b",
            points: 1.0,
            kinds: &[Table],
            question: "Compile the whole Transformer and compare it with the uncompiled model in the end-to-end \
                       benchmark: the forward pass alone, and forward, backward and optimizer step together.",
        },
    ],
};

pub(super) const FLASH_FORWARD: HandoutProblem = HandoutProblem {
    name: "flash_forward",
    title: "FlashAttention-2, forward",
    section: "1.3.2",
    points: 15.0,
    parts: &[
        Part {
            id: "a",
            points: 5.0,
            kinds: &[Code],
            question: "Write the tiled forward pass of FlashAttention-2 with tensor operations as a differentiable \
                       function of Q, K, V and a causal flag (which this part may ignore). It computes O and the \
                       logsumexp L, saves L, Q, K, V and O for the backward pass, and returns O.",
        },
        Part {
            id: "b",
            points: 8.0,
            kinds: &[Code],
            question: "Write the same forward pass as a GPU kernel: one block per tile of queries and batch element, a \
                       single loop over tiles of keys, running maximum, sum and output kept on chip in float32, the \
                       probabilities cast to the type of V before they multiply it, and O cast to its own type before it \
                       is stored.",
        },
        Part {
            id: "c",
            points: 2.0,
            kinds: &[Code],
            question: "Add a causal flag, off unless given: compare query and key indices in the kernel, add -1e6 to the \
                       scores that the mask excludes, and keep the flag for the backward pass.",
        },
    ],
};

pub(super) const FLASH_BACKWARD: HandoutProblem = HandoutProblem {
    name: "flash_backward",
    title: "FlashAttention-2, backward",
    section: "1.3.2",
    points: 5.0,
    parts: &[Part {
        id: "",
        points: 5.0,
        kinds: &[Code],
        question: "Write the backward pass that takes Q, K, V, O, dO and L, computes $D = \\mathrm{rowsum}(O \\circ dO)$, recomputes the \
                   probabilities from L instead of loading them, and returns dQ, dK and dV.",
    }],
};

pub(super) const FLASH_BENCHMARKING: HandoutProblem = HandoutProblem {
    name: "flash_benchmarking",
    title: "FlashAttention-2 against plain attention",
    section: "1.3.2",
    points: 5.0,
    parts: &[Part {
        id: "a",
        points: 5.0,
        kinds: &[Table],
        question: "Compare FlashAttention-2 with plain attention on one H100: causal, batch size 1, sequence lengths in \
                   powers of two from 128 to 65536, widths in powers of two from 16 to 128, in bfloat16 and in float32. \
                   Report the latency of forward, backward, and both together, with inputs made before the clock starts \
                   and tile sizes fitted to the input.",
    }],
};
