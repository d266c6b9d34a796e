"""The papers and books behind the methods.

An entry has its key, year and venue, then the authors, then the title, and last where it is found, as far as
that is certain. A line that is indented goes on.
"""

from __future__ import annotations

from net2gp.citations.reference import Reference, read

TEXT = """
mackay1992practical 1992 Neural Computation
MacKay, D. J. C.
A practical Bayesian framework for backpropagation networks
doi:10.1162/neco.1992.4.3.448

mackay1992interpolation 1992 Neural Computation
MacKay, D. J. C.
Bayesian interpolation
doi:10.1162/neco.1992.4.3.415

mackay1992evidence 1992 Neural Computation
MacKay, D. J. C.
The evidence framework applied to classification networks
doi:10.1162/neco.1992.4.5.720

neal1996 1996 book Springer
Neal, R. M.
Bayesian learning for neural networks
doi:10.1007/978-1-4612-0745-0

rasmussen2006 2006 book MIT Press
Rasmussen, C. E. and Williams, C. K. I.
Gaussian processes for machine learning
doi:10.7551/mitpress/3206.001.0001

nickisch2008 2008 Journal of Machine Learning Research
Nickisch, H. and Rasmussen, C. E.
Approximations for binary Gaussian process classification

papandreou2010 2010 NeurIPS
Papandreou, G. and Yuille, A. L.
Gaussian sampling by local perturbations

titsias2010 2010 AISTATS
Titsias, M. K. and Lawrence, N. D.
Bayesian Gaussian process latent variable model

halko2011 2011 SIAM Review
Halko, N. and Martinsson, P. G. and Tropp, J. A.
Finding structure with randomness: probabilistic algorithms for constructing approximate matrix
    decompositions
doi:10.1137/090771806 arXiv:0909.4061

graves2011 2011 NeurIPS
Graves, A.
Practical variational inference for neural networks

neal2011 2011 Handbook of Markov Chain Monte Carlo
Neal, R. M.
MCMC using Hamiltonian dynamics
arXiv:1206.1901

welling2011 2011 ICML
Welling, M. and Teh, Y. W.
Bayesian learning via stochastic gradient Langevin dynamics

vovk2005 2005 book Springer
Vovk, V. and Gammerman, A. and Shafer, G.
Algorithmic learning in a random world

vovk2012 2012 ACML
Vovk, V.
Conditional validity of inductive conformal predictors

damianou2013 2013 AISTATS
Damianou, A. and Lawrence, N.
Deep Gaussian processes
arXiv:1211.0358

chen2014 2014 ICML
Chen, T. and Fox, E. B. and Guestrin, C.
Stochastic gradient Hamiltonian Monte Carlo
arXiv:1402.4102

hoffman2014 2014 Journal of Machine Learning Research
Hoffman, M. D. and Gelman, A.
The No-U-Turn sampler: adaptively setting path lengths in Hamiltonian Monte Carlo
arXiv:1111.4246

blundell2015 2015 ICML
Blundell, C. and Cornebise, J. and Kavukcuoglu, K. and Wierstra, D.
Weight uncertainty in neural networks
arXiv:1505.05424

kingma2015 2015 NeurIPS
Kingma, D. P. and Salimans, T. and Welling, M.
Variational dropout and the local reparameterization trick
arXiv:1506.02557

martens2015 2015 ICML
Martens, J. and Grosse, R.
Optimizing neural networks with Kronecker-factored approximate curvature
arXiv:1503.05671

gal2016 2016 ICML
Gal, Y. and Ghahramani, Z.
Dropout as a Bayesian approximation: representing model uncertainty in deep learning
arXiv:1506.02142

li2016 2016 AAAI
Li, C. and Chen, C. and Carlson, D. and Carin, L.
Preconditioned stochastic gradient Langevin dynamics for deep neural networks
arXiv:1512.07666

wilson2016 2016 AISTATS
Wilson, A. G. and Hu, Z. and Salakhutdinov, R. and Xing, E. P.
Deep kernel learning
arXiv:1511.02222

lakshminarayanan2017 2017 NeurIPS
Lakshminarayanan, B. and Pritzel, A. and Blundell, C.
Simple and scalable predictive uncertainty estimation using deep ensembles
arXiv:1612.01474

salimbeni2017 2017 NeurIPS
Salimbeni, H. and Deisenroth, M. P.
Doubly stochastic variational inference for deep Gaussian processes
arXiv:1705.08933

betancourt2017 2017 arXiv preprint
Betancourt, M.
A conceptual introduction to Hamiltonian Monte Carlo
arXiv:1701.02434

havasi2018 2018 NeurIPS
Havasi, M. and Hernández-Lobato, J. M. and Murillo-Fuentes, J. J.
Inference in deep Gaussian processes using stochastic gradient Hamiltonian Monte Carlo
arXiv:1806.05490

jacot2018 2018 NeurIPS
Jacot, A. and Gabriel, F. and Hongler, C.
Neural tangent kernel: convergence and generalization in neural networks
arXiv:1806.07572

khan2018 2018 ICML
Khan, M. E. and others
Fast and scalable Bayesian deep learning by weight-perturbation in Adam
arXiv:1806.04854

lee2018 2018 ICLR
Lee, J. and Bahri, Y. and Novak, R. and Schoenholz, S. S. and Pennington, J. and Sohl-Dickstein, J.
Deep neural networks as Gaussian processes
arXiv:1711.00165

lei2018 2018 Journal of the American Statistical Association
Lei, J. and G'Sell, M. and Rinaldo, A. and Tibshirani, R. J. and Wasserman, L.
Distribution-free predictive inference for regression
arXiv:1604.04173

martens2018 2018 ICLR
Martens, J. and Ba, J. and Johnson, M.
Kronecker-factored curvature approximations for recurrent neural networks

wen2018 2018 ICLR
Wen, Y. and Vicol, P. and Ba, J. and Tran, D. and Grosse, R.
Flipout: efficient pseudo-independent weight perturbations on mini-batches
arXiv:1803.04386

khan2019 2019 NeurIPS
Khan, M. E. and Immer, A. and Abedi, E. and Korzepa, M.
Approximate inference turns deep networks into Gaussian processes
arXiv:1906.01930

lee2019 2019 NeurIPS
Lee, J. and Xiao, L. and Schoenholz, S. S. and Bahri, Y. and Novak, R. and Sohl-Dickstein, J. and
    Pennington, J.
Wide neural networks of any depth evolve as linear models under gradient descent
arXiv:1902.06720

maddox2019 2019 NeurIPS
Maddox, W. J. and Garipov, T. and Izmailov, P. and Vetrov, D. and Wilson, A. G.
A simple baseline for Bayesian uncertainty in deep learning
arXiv:1902.02476

osawa2019 2019 NeurIPS
Osawa, K. and others
Practical deep learning with Bayesian principles
arXiv:1906.02506

phan2019 2019 arXiv preprint
Phan, D. and Pradhan, N. and Jankowiak, M.
Composable effects for flexible and accelerated probabilistic programming in NumPyro
arXiv:1912.11554

sadinle2019 2019 Journal of the American Statistical Association
Sadinle, M. and Lei, J. and Wasserman, L.
Least ambiguous set-valued classifiers with bounded error levels

yang2019 2019 NeurIPS
Yang, G.
Tensor programs I: wide feedforward or recurrent neural networks of any architecture are Gaussian
    processes
arXiv:1910.12478

he2020 2020 NeurIPS
He, B. and Lakshminarayanan, B. and Teh, Y. W.
Bayesian deep ensembles via the neural tangent kernel
arXiv:2007.05864

jankowiak2020 2020 UAI
Jankowiak, M. and Pleiss, G. and Gardner, J. R.
Deep sigma point processes
arXiv:2002.09112

lin2020 2020 ICML
Lin, W. and Schmidt, M. and Khan, M. E.
Handling the positive-definite constraint in the Bayesian learning rule
arXiv:2002.10060

romano2020 2020 NeurIPS
Romano, Y. and Sesia, M. and Candès, E.
Classification with valid and adaptive coverage
arXiv:2006.02544

wilson2020 2020 NeurIPS
Wilson, A. G. and Izmailov, P.
Bayesian deep learning and a probabilistic perspective of generalization
arXiv:2002.08791

yang2020 2020 arXiv preprint
Yang, G.
Tensor programs II: neural tangent kernel for any architecture
arXiv:2006.14548

zhang2020 2020 ICLR
Zhang, R. and Li, C. and Zhang, J. and Chen, C. and Wilson, A. G.
Cyclical stochastic gradient MCMC for Bayesian deep learning
arXiv:1902.03932

barber2021 2021 Annals of Statistics
Barber, R. F. and Candès, E. J. and Ramdas, A. and Tibshirani, R. J.
Predictive inference with the jackknife+
arXiv:1905.02928

daxberger2021redux 2021 NeurIPS
Daxberger, E. and Kristiadi, A. and Immer, A. and Eschenhagen, R. and Bauer, M. and Hennig, P.
Laplace redux: effortless Bayesian deep learning
arXiv:2106.14806

daxberger2021subnetwork 2021 ICML
Daxberger, E. and Nalisnick, E. and Allingham, J. U. and Antorán, J. and Hernández-Lobato,
    J. M.
Bayesian deep learning via subnetwork inference
arXiv:2010.14689

eschenhagen2021 2021 arXiv preprint
Eschenhagen, R. and Daxberger, E. and Hennig, P. and Kristiadi, A.
Mixtures of Laplace approximations for improved post-hoc uncertainty in deep learning
arXiv:2111.03577

fortuin2022 2022 ICLR
Fortuin, V. and others
Bayesian neural network priors revisited
arXiv:2102.06571

immer2021linearization 2021 AISTATS
Immer, A. and Korzepa, M. and Bauer, M.
Improving predictions of Bayesian neural nets via local linearization
arXiv:2008.08400

immer2021evidence 2021 ICML
Immer, A. and Bauer, M. and Fortuin, V. and Rätsch, G. and Khan, M. E.
Scalable marginal likelihood estimation for model selection in deep learning
arXiv:2104.04975

maddox2021 2021 AISTATS
Maddox, W. J. and Tang, S. and Moreno, P. G. and Wilson, A. G. and Damianou, A.
Fast adaptation with linearized neural networks
arXiv:2103.01439

ober2021 2021 UAI
Ober, S. W. and Rasmussen, C. E. and van der Wilk, M.
The promises and pitfalls of deep kernel learning
arXiv:2102.12108

hobbhahn2022 2022 UAI
Hobbhahn, M. and Kristiadi, A. and Hennig, P.
Fast predictive uncertainty for classification with Bayesian deep networks
arXiv:2003.01227

antoran2023 2023 ICLR
Antorán, J. and others
Sampling-based inference for large linear models, with application to linearised Laplace
arXiv:2210.04994

eschenhagen2023 2023 NeurIPS
Eschenhagen, R. and Immer, A. and Turner, R. E. and Schneider, F. and Hennig, P.
Kronecker-factored approximate curvature for modern neural network architectures
arXiv:2311.00636

robnik2023 2023 Journal of Machine Learning Research
Robnik, J. and De Luca, G. B. and Silverstein, E. and Seljak, U.
Microcanonical Hamiltonian Monte Carlo
arXiv:2212.08549

shen2024 2024 ICML
Shen, Y. and others
Variational learning is effective for large deep networks
arXiv:2402.17641

sommer2025 2025 ICLR
Sommer, E. and Robnik, J. and Nozadze, G. and Seljak, U. and Rügamer, D.
Microcanonical Langevin ensembles: advancing the sampling of Bayesian neural networks
arXiv:2502.06335
"""

WORKS: dict[str, Reference] = {reference.key: reference for reference in read(TEXT)}
