//! Sections 2 and 3 of the handout: data parallelism, communication accounting, and optimizer state sharding.

use super::Kind::{Code, Equations, Image, Table, Written};
use super::{HandoutProblem, Part};

pub(super) const DISTRIBUTED_COMMUNICATION_SINGLE_NODE: HandoutProblem = HandoutProblem {
    name: "distributed_communication_single_node",
    title: "All-reduce on one node",
    section: "2.1",
    points: 5.0,
    parts: &[Part {
        id: "",
        points: 5.0,
        kinds: &[Code, Table, Written],
        question: "Benchmark the all-reduce of float32 tensors of 1 MB, 10 MB, 100 MB and 1 GB with 2, 4 and 6 \
                   processes, over Gloo on CPUs and NCCL on GPUs. Tabulate or plot the times and comment on how \
                   back end, size and number of processes interact.",
    }],
};

pub(super) const NAIVE_DDP: HandoutProblem = HandoutProblem {
    name: "naive_ddp",
    title: "Data parallelism, the plain way",
    section: "2.2",
    points: 5.0,
    parts: &[Part {
        id: "",
        points: 5.0,
        kinds: &[Code],
        question: "Train data-parallel by averaging each parameter's gradient over the processes with one all-reduce per \
                   parameter after the backward pass: parameters start as rank 0's, each process takes its share of the \
                   batch, and all take the same step. Verify on a toy model with random data that the weights match \
                   those of single-process training.",
    }],
};

pub(super) const NAIVE_DDP_BENCHMARKING: HandoutProblem = HandoutProblem {
    name: "naive_ddp_benchmarking",
    title: "The cost of plain data parallelism",
    section: "2.2",
    points: 3.0,
    parts: &[Part {
        id: "",
        points: 3.0,
        kinds: &[Code, Table, Written],
        question: "With the XL model on one node with two GPUs, measure the time of a training iteration under plain \
                   data parallelism and the part of it spent communicating gradients. Describe the setup.",
    }],
};

pub(super) const MINIMAL_DDP_FLAT_BENCHMARKING: HandoutProblem = HandoutProblem {
    name: "minimal_ddp_flat_benchmarking",
    title: "One all-reduce for all gradients",
    section: "2.3.1",
    points: 2.0,
    parts: &[Part {
        id: "",
        points: 2.0,
        kinds: &[Code, Table, Written],
        question: "Copy all gradients into one flat tensor and communicate it with a single all-reduce. In the setting \
                   of the previous problem, report the time per iteration and the time communicating, and compare with \
                   one call per parameter.",
    }],
};

pub(super) const DDP_OVERLAP_INDIVIDUAL_PARAMETERS: HandoutProblem = HandoutProblem {
    name: "ddp_overlap_individual_parameters",
    title: "Communicating while the backward pass runs",
    section: "2.3.2",
    points: 5.0,
    parts: &[Part {
        id: "",
        points: 5.0,
        kinds: &[Code],
        question: "Write a data-parallel wrapper that broadcasts rank 0's weights when it is made, starts an \
                   asynchronous all-reduce for each parameter as soon as its gradient has been accumulated in the \
                   backward pass, and offers a call that waits for all of them before the optimizer step.",
    }],
};

pub(super) const DDP_OVERLAP_INDIVIDUAL_PARAMETERS_BENCHMARKING: HandoutProblem = HandoutProblem {
    name: "ddp_overlap_individual_parameters_benchmarking",
    title: "What overlap gains",
    section: "2.3.2",
    points: 1.0,
    parts: &[
        Part {
            id: "a",
            points: 0.5,
            kinds: &[Table, Written],
            question: "With the XL model on two GPUs, measure the time per iteration when communication overlaps the \
                       backward pass, and compare it with one call per parameter and with one flat call.",
        },
        Part {
            id: "b",
            points: 0.5,
            kinds: &[Image],
            question: "Show two profiler timelines: plain data parallelism, where communication follows the backward \
                       pass, and this version, where the two run at the same time.",
        },
    ],
};

pub(super) const DDP_OVERLAP_BUCKETED: HandoutProblem = HandoutProblem {
    name: "ddp_overlap_bucketed",
    title: "Overlap in buckets",
    section: "2.3.3",
    points: 8.0,
    parts: &[Part {
        id: "",
        points: 8.0,
        kinds: &[Code],
        question: "Extend the overlapping wrapper with buckets: parameters, taken in the reverse of the model's order, \
                   fill buckets that hold at most `bucket_size_mb` each, and a bucket's gradients are communicated in \
                   one asynchronous all-reduce once all of them are ready.",
    }],
};

pub(super) const DDP_BUCKETED_BENCHMARKING: HandoutProblem = HandoutProblem {
    name: "ddp_bucketed_benchmarking",
    title: "Choosing a bucket size",
    section: "2.3.3",
    points: 3.0,
    parts: &[
        Part {
            id: "a",
            points: 1.5,
            kinds: &[Table, Written],
            question: "With the XL model on two GPUs, measure the time per iteration at bucket sizes of 1, 10, 100 and \
                       1000 MB. Do the results match what you expected? If not, why, and which change of the setup would \
                       make them?",
        },
        Part {
            id: "b",
            points: 1.5,
            kinds: &[Equations],
            question: "Suppose that computing a bucket's gradients takes as long as communicating them. Express the time \
                       that data parallelism adds after the backward pass through the model's size in bytes, the \
                       bandwidth of the all-reduce, the fixed cost of one call and the number of buckets; then derive \
                       the bucket size that makes it smallest.",
        },
    ],
};

pub(super) const COMMUNICATION_ACCOUNTING: HandoutProblem = HandoutProblem {
    name: "communication_accounting",
    title: "Accounting for 4D parallelism",
    section: "2.4",
    points: 10.0,
    parts: &[
        Part {
            id: "a",
            points: 3.0,
            kinds: &[Equations, Written],
            question: "A model called XXL has width 16384, hidden width 53248 and 126 blocks; each block counts as two \
                       linear layers, one up and one down, and attention, embeddings, output layer and activation \
                       functions are left out. Master weights, accumulated gradients and Adam's state are float32; \
                       activations are bfloat16 and none are recomputed. How much memory does one device need for \
                       weights, gradients and optimizer state, how much for the activations kept for the backward pass, \
                       and how many 80 GB H100s is that?",
        },
        Part {
            id: "b",
            points: 2.0,
            kinds: &[Equations, Written],
            question: "Weights, gradients, optimizer state and half of the activations are sharded over $N_{FSDP}$ \
                       devices. Write down the memory per device. From which $N_{FSDP}$ on does it stay below the 95 GB \
                       of one TPU v5p?",
        },
        Part {
            id: "c",
            points: 3.0,
            kinds: &[Equations, Written],
            question: "Consider the forward pass on TPU v5p with $W_{ici} = 2 \\cdot 9 \\cdot 10^{10}$ bytes/s per mesh axis and \
                       $C = 4.6 \\cdot 10^{14}$ FLOP/s, sharded 16 ways by FSDP ($X = 16$, over $M_X = 2$ mesh axes) and 4 \
                       ways by tensor parallelism ($Y = 4$, over $M_Y = 1$). From which batch size per device on is the \
                       model bound by compute, and what is the batch size of all devices together?",
        },
        Part {
            id: "d",
            points: 2.0,
            kinds: &[Written],
            question: "One wants the batch size as small as throughput allows. Which other techniques lower it without \
                       giving up throughput? Support the answer with references or equations.",
        },
    ],
};

pub(super) const OPTIMIZER_STATE_SHARDING: HandoutProblem = HandoutProblem {
    name: "optimizer_state_sharding",
    title: "Sharding the optimizer's state",
    section: "3",
    points: 15.0,
    parts: &[Part {
        id: "",
        points: 15.0,
        kinds: &[Code],
        question: "Write a wrapper around any optimizer that divides the parameters over the processes: each process \
                   keeps state for, and steps, only its own share, and then broadcasts what it has updated. Parameters \
                   or parameter groups can be given at the start, and groups can be added during training.",
    }],
};

pub(super) const OPTIMIZER_STATE_SHARDING_ACCOUNTING: HandoutProblem = HandoutProblem {
    name: "optimizer_state_sharding_accounting",
    title: "What sharding the optimizer saves and costs",
    section: "3",
    points: 5.0,
    parts: &[
        Part {
            id: "a",
            points: 2.0,
            kinds: &[Code, Table, Written],
            question: "With the XL model on two GPUs, measure the peak memory after the model is made, just before the \
                       optimizer step and just after it, with and without sharding. Do the figures match what you \
                       expect? Split them into parameters, gradients, optimizer state and the rest.",
        },
        Part {
            id: "b",
            points: 1.0,
            kinds: &[Table, Written],
            question: "How does sharding the optimizer state change the time of a training iteration? Give the times \
                       with and without it.",
        },
        Part {
            id: "c",
            points: 2.0,
            kinds: &[Written],
            question: "How does this scheme differ from stage 1 of ZeRO, above all in memory and in the volume \
                       communicated?",
        },
    ],
};
